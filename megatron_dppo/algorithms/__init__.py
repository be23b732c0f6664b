"""Policy-gradient objectives, trust regions and divergences: pure functions of tensors."""

from megatron_dppo.algorithms.advantages import (
    AGGREGATIONS,
    group_advantages,
    have_equal_rewards,
    sequence_weights,
    token_weights,
)
from megatron_dppo.algorithms.divergence import (
    DIVERGENCES,
    Divergence,
    TopKLogProbs,
    binary_kl,
    binary_tv,
    topk_kl,
    topk_partition,
    topk_tv,
)
from megatron_dppo.algorithms.inputs import PolicyLossInputs, TrustRegionTokens
from megatron_dppo.algorithms.loss import PolicyLossOutput, policy_loss
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.own_rule import rule_options
from megatron_dppo.algorithms.presets import PRESETS, RULES, preset
from megatron_dppo.algorithms.responses import Responses
from megatron_dppo.algorithms.shadow import shadow_masks, shadow_weights

__all__ = [
    "AGGREGATIONS",
    "DIVERGENCES",
    "PRESETS",
    "RULES",
    "Divergence",
    "Objective",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "Responses",
    "TopKLogProbs",
    "TrustRegionTokens",
    "binary_kl",
    "binary_tv",
    "group_advantages",
    "have_equal_rewards",
    "policy_loss",
    "preset",
    "rule_options",
    "sequence_weights",
    "shadow_masks",
    "shadow_weights",
    "token_weights",
    "topk_kl",
    "topk_partition",
    "topk_tv",
]
