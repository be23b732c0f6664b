"""The trust-region loss over logits, fused; see README.md."""

from megatron_dppo.kernels.fused import fused_linear_policy_loss, fused_policy_loss
from megatron_dppo.kernels.linear import packed_linear_policy_loss
from megatron_dppo.kernels.log_probs import score_norms, token_log_probs
from megatron_dppo.kernels.loss import FusedPolicyLoss, fused_metrics, packed_policy_loss

__all__ = [
    "FusedPolicyLoss",
    "fused_linear_policy_loss",
    "fused_metrics",
    "fused_policy_loss",
    "packed_linear_policy_loss",
    "packed_policy_loss",
    "score_norms",
    "token_log_probs",
]
