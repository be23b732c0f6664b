"""All three kernels on a few small tensors, for compute-sanitizer; run by test_kernels.py."""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402

from megatron_dppo.algorithms import preset  # noqa: E402
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss  # noqa: E402
from tests.support.loss_batches import make_batch  # noqa: E402


def main(device: torch.device) -> None:
    """Both losses, in both types, from columns that are and are not aligned; the linear one compacts rows."""
    objective = preset("dppo_topk_kl", top_k=6, entropy_coef=0.01)
    for dtype in (torch.float32, torch.bfloat16):
        for padding in (3, 7):
            batch = make_batch(torch.float32, num_tokens=24, vocab_size=1001, padding=padding)
            arguments: dict[str, Any] = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in batch.arguments.items()
            }
            hidden, weight = (x.to(device, dtype).requires_grad_() for x in (batch.hidden, batch.weight))
            logits = (hidden @ weight.t()).detach().requires_grad_()
            fused_policy_loss(logits, **arguments, objective=objective).loss_sum.backward()
            masked = preset("dppo_binary_tv", delta=0.01)
            fused_linear_policy_loss(hidden, weight, **arguments, objective=masked).loss_sum.backward()
            for gradient in (logits.grad, hidden.grad, weight.grad):
                assert gradient is not None and bool(gradient.isfinite().all())


if __name__ == "__main__":
    main(torch.device("cuda"))
