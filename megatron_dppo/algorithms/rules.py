"""The registry of trust-region rules, and the weight that one gives to each token."""

from collections.abc import Mapping

from torch import Tensor

from megatron_dppo.algorithms.masks import drops_bad_negatives, drops_by_divergence, drops_by_ratio, drops_none
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.registry import registry
from megatron_dppo.algorithms.response_rules import (
    drops_by_prefix,
    drops_by_response_ratio,
    drops_divergent_responses,
    drops_mismatched_responses,
)
from megatron_dppo.algorithms.token_rules import (
    drops_by_distance,
    drops_by_prediction,
    drops_outside_band,
    weigh_by_sigmoid,
    weigh_linearly,
)
from megatron_dppo.algorithms.trust_region import TrustRegionRule, TrustRegionTokens, masking


def weigh_by_own(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Weigh by the user's function; see `OwnRule`."""
    assert objective.own is not None, "an objective with rule = 'own' has one"
    return objective.own.weigh(tokens)


RULES: Mapping[str, TrustRegionRule] = registry(
    "RULES",
    {
        "none": TrustRegionRule(masking(drops_none), id=0),
        "ratio": TrustRegionRule(masking(drops_by_ratio), id=1),
        "divergence": TrustRegionRule(masking(drops_by_divergence), id=2),
        "negative": TrustRegionRule(masking(drops_bad_negatives), id=3),
        "distance": TrustRegionRule(masking(drops_by_distance), id=4),
        "linear": TrustRegionRule(weigh_linearly, id=5),
        "prediction": TrustRegionRule(masking(drops_by_prediction), id=6),
        "band": TrustRegionRule(masking(drops_outside_band), id=7),
        "sigmoid": TrustRegionRule(weigh_by_sigmoid, id=8),
        "response_ratio": TrustRegionRule(masking(drops_by_response_ratio), id=9),
        "response_mismatch": TrustRegionRule(masking(drops_mismatched_responses), id=10),
        "response_divergence": TrustRegionRule(masking(drops_divergent_responses), id=11),
        "prefix": TrustRegionRule(masking(drops_by_prefix), id=12),
        "own": TrustRegionRule(weigh_by_own, id=13),
    },
)


def trust_region_weight(objective: Objective, tokens: TrustRegionTokens) -> Tensor:
    """Return the factor of each token's update, [T]: 0 drops it, 1 keeps it, below 0 reverses it."""
    return RULES[objective.rule].weigh(objective, tokens)
