"""The gated delta rule of packed sequences equals its definition, token by token, and each sequence alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.architectures.sizes import DELTA_CHUNK as CHUNK
from megatron_dppo.models import delta_rule
from megatron_dppo.models.delta_rule import Chunks, causal_convolution, kernel_fault, recomputed
from megatron_dppo.runtime.libraries import Library

HEADS, KEY, VALUE, WIDTH = 3, 5, 4, 4
LENGTHS = (3, 2 * CHUNK + 7, 1, CHUNK, CHUNK + 1, 2)


def chunks_of(lengths: tuple[int, ...]) -> Chunks:
    return Chunks.of(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), WIDTH)


def random_inputs(num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)]
    draws = [torch.randn(num_tokens, *s, generator=generator, dtype=torch.float64) for s in shapes]
    query, key, value, decay, rate = draws
    return [x.requires_grad_() for x in (query, key, value, -F.softplus(decay - 2), rate.sigmoid())]


def by_definition(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """The rule of one sequence, a token at a time."""
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    state, outputs = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), list[Tensor]()
    for q, k, v, g, b in zip(query * KEY**-0.5, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        difference = b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * difference[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outputs)


def test_a_packed_batch_equals_the_definition_of_each_sequence_with_gradients() -> None:
    inputs = random_inputs(sum(LENGTHS))
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    expected = torch.cat([by_definition(*of_sequence) for of_sequence in parts])
    weight = torch.randn_like(expected)
    found = recomputed(chunks_of(LENGTHS).rule, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    exact = torch.autograd.grad(expected, inputs, weight)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, weight), exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_no_sequence_reads_another_one(order: tuple[int, ...]) -> None:
    lengths = (70, 3, 130)
    alone = [random_inputs(length) for length in lengths]
    packed = [torch.cat([alone[i][column] for i in order]) for column in range(5)]
    own = tuple(lengths[i] for i in order)
    for index, part in zip(order, chunks_of(own).rule(*packed).split(own), strict=True):
        single = chunks_of((lengths[index],)).rule(*alone[index])
        torch.testing.assert_close(part, single, rtol=1e-12, atol=1e-13)


def test_the_convolution_sees_its_own_sequence_only() -> None:
    weight = torch.randn(6, 1, WIDTH, dtype=torch.float64)
    values = torch.randn(sum(LENGTHS), 6, dtype=torch.float64)
    parts = [F.pad(x.T, (WIDTH - 1, 0)) for x in values.split(LENGTHS)]
    expected = torch.cat([F.conv1d(x[None], weight, groups=6)[0].T for x in parts])
    torch.testing.assert_close(causal_convolution(values, weight, chunks_of(LENGTHS)), expected)


def test_only_the_arguments_are_kept_for_the_backward_pass() -> None:
    kept: list[Tensor] = []
    inputs = random_inputs(2 * CHUNK)
    inputs[3] = inputs[3].detach()  # as a frozen weight's product
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = recomputed(chunks_of((2 * CHUNK,)).rule, *inputs)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs}
    output.sum().backward()
    assert [x.grad is None for x in inputs] == [False, False, False, True, False]


@pytest.mark.parametrize("fault", ["missing", "forward", "backward", "wrong gradient", None])
def test_kernels_are_used_if_both_passes_are_right(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the kernels, because there is no GPU."""

    class Kernels(Chunks):
        def rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
            if fault == "forward":
                raise RuntimeError("no such instruction\nand more lines")
            output = super().rule(query, key, value, decay, rate)
            if fault == "backward":
                output.register_hook(lambda _: _refuse())
            return output + 0.2 * (query - query.detach()).sum() if fault == "wrong gradient" else output

    def _refuse() -> None:
        raise ValueError("Triton 3.6 compiles it wrongly")

    library = Library("not installed" if fault == "missing" else None)
    monkeypatch.setattr(delta_rule, "delta_rule_kernels", lambda is_on_gpu: library)
    monkeypatch.setattr(delta_rule, "KernelSequences", Kernels)
    kernel_fault.cache_clear()
    found = kernel_fault("cpu", torch.bfloat16, HEADS, 8, 16)
    assert kernel_fault("cpu", torch.float32, HEADS, 8, 16) is not None, "they are not exact"
    kernel_fault.cache_clear()
    reasons = {"missing": "not installed", "forward": "RuntimeError: no such instruction"}
    reasons |= {
        "backward": "ValueError: Triton 3.6 compiles it wrongly",
        "wrong gradient": "their results are wrong",
    }
    assert found == (None if fault is None else reasons[fault])
