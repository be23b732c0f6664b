"""The trust-region loss over logits, fused; see README.md."""

from megatron_dppo.kernels.linear import fused_linear_policy_loss, linear_log_probs, packed_linear_policy_loss
from megatron_dppo.kernels.loss import (
    FusedPolicyLoss,
    fused_log_probs,
    fused_metrics,
    fused_policy_loss,
    packed_policy_loss,
)
from megatron_dppo.kernels.output_layer import linear_score_norms, score_norms

__all__ = [
    "FusedPolicyLoss",
    "fused_linear_policy_loss",
    "fused_log_probs",
    "fused_metrics",
    "fused_policy_loss",
    "linear_log_probs",
    "linear_score_norms",
    "packed_linear_policy_loss",
    "packed_policy_loss",
    "score_norms",
]
