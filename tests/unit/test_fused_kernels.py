"""The fused losses over the kernels' source, compiled for the host, equal those over the PyTorch reference.

Objectives that the kernels do not know are combined in PyTorch, between kernels that read and write the logits.
"""

from itertools import product

import pytest
import torch

from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss, ops
from megatron_dppo.kernels.library import KernelLibrary
from tests.support.loss_batches import make_batch
from tests.unit.test_fused_loss import FIELDS, OF_HIDDEN_STATES, VARIANTS, relative

LIMIT = 2e-5


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *product(VARIANTS, ["logits"]),
        *product(OF_HIDDEN_STATES, ["in place", "hidden states", "float32 logits"]),
    ],
)
def test_kernels_give_what_the_reference_gives(
    name: str, form: str, host_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = VARIANTS[name]
    batch = make_batch(torch.float32, top_k=objective.top_k)

    def run() -> tuple[object, list[torch.Tensor]]:
        if form in ("logits", "in place"):
            inputs = [(batch.hidden @ batch.weight.T).requires_grad_()]
            logits = inputs[0] * 1.0
            out = fused_policy_loss(
                logits, **batch.arguments, objective=objective, inplace_backward=form == "in place"
            )
        else:
            wide = torch.float32 if form == "float32 logits" else None
            inputs = [batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_()]
            out = fused_linear_policy_loss(
                *inputs, **batch.arguments, objective=objective, chunk_bytes=7 * 400, logits_dtype=wide
            )
        out.loss_sum.backward()
        return out, [x.grad for x in inputs if x.grad is not None]

    expected, gradients = run()
    monkeypatch.setattr(ops, "kernels_of", lambda tensor: host_library)
    monkeypatch.setattr(ops, "is_compiled_for", lambda device_type: True)  # which checks no values
    found, own = run()
    for field in FIELDS:
        assert relative(getattr(found, field), getattr(expected, field)) <= LIMIT, field
    assert len(own) == len(gradients) > 0
    assert all(relative(a, b) <= LIMIT for a, b in zip(own, gradients, strict=True))
