"""Policy-gradient objectives, trust regions and divergences: pure functions of tensors."""

from megatron_dppo.algorithms.advantages import group_advantages
from megatron_dppo.algorithms.aggregate import AGGREGATIONS, sequence_weights, token_weights
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
from megatron_dppo.algorithms.inputs import PolicyLossInputs
from megatron_dppo.algorithms.loss import PolicyLossOutput, policy_loss
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.presets import PRESETS, preset
from megatron_dppo.algorithms.shadow import shadow_masks
from megatron_dppo.algorithms.trust_region import RULES, TrustRegionRule, TrustRegionTokens, trust_region_mask

__all__ = [
    "AGGREGATIONS",
    "DIVERGENCES",
    "PRESETS",
    "RULES",
    "Divergence",
    "Objective",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "TopKLogProbs",
    "TrustRegionRule",
    "TrustRegionTokens",
    "binary_kl",
    "binary_tv",
    "group_advantages",
    "policy_loss",
    "preset",
    "sequence_weights",
    "shadow_masks",
    "token_weights",
    "topk_kl",
    "topk_partition",
    "topk_tv",
    "trust_region_mask",
]
