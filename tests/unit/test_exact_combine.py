"""Sums over a token's experts: Megatron's bits in float32; one rounding in bfloat16, in a fixed order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron.core.transformer.moe.moe_utils as megatron
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.mcore import layer_functions

TOKENS, HIDDEN = 300, 48
Functions = tuple[Callable[..., Any], Callable[..., Any]]
OURS: Functions = (layer_functions.permute, layer_functions.unpermute)
MEGATRONS: Functions = (megatron.permute, megatron.unpermute)


@dataclass
class Layer:
    """What goes into the experts of one layer, and the gradient of what comes out."""

    tokens: Tensor  # [T, H]
    routing_map: Tensor  # [T, experts] bool
    probs: Tensor  # [T, experts]
    gradient: Tensor  # [T, H]

    def of(self, order: Tensor) -> "Layer":
        """The same tokens in another order."""
        return Layer(*(values[order] for values in (self.tokens, self.routing_map, self.probs, self.gradient)))


def layer(num_experts: int, top_k: int, dtype: torch.dtype) -> Layer:
    generator = torch.Generator().manual_seed(top_k)
    tokens, gradient = torch.randn(2, TOKENS, HIDDEN, generator=generator).to(dtype)
    chosen = torch.rand(TOKENS, num_experts, generator=generator).topk(top_k).indices
    routing_map = torch.zeros(TOKENS, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.rand(TOKENS, num_experts, generator=generator) * routing_map
    return Layer(tokens, routing_map, probs, gradient)


def outcome(functions: Functions, given: Layer, top_k: int) -> dict[str, Tensor]:
    """Output and gradients through experts that scale each row by a number and by its probability."""
    permute, unpermute = functions
    tokens, probs = given.tokens.clone().requires_grad_(), given.probs.clone().requires_grad_()
    rows, row_probs, indices, *_ = permute(tokens, given.routing_map, probs, num_out_tokens=TOKENS * top_k)
    scaled = (rows * scales(given) * row_probs[:, None]).to(rows.dtype)
    output = unpermute(scaled, indices, tokens.shape, routing_map=given.routing_map)
    output.backward(given.gradient)
    assert tokens.grad is not None and probs.grad is not None
    return {"rows": rows, "output": output, "tokens": tokens.grad, "probs": probs.grad, "scaled": scaled}


def scales(given: Layer) -> Tensor:
    """[N, 1]: the number by which each row's expert multiplies it."""
    per_expert = given.routing_map.sum(0)
    return torch.linspace(0.3, 1.7, per_expert.numel()).repeat_interleave(per_expert)[:, None]


def slopes(given: Layer) -> Tensor:
    """[N, 1]: the derivative of each row's output with respect to its input."""
    return scales(given) * given.probs.T[given.routing_map.T][:, None]


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 1), (8, 2), (32, 4), (128, 8)])
def test_float32_is_megatrons_bit_for_bit(num_experts: int, top_k: int) -> None:
    given = layer(num_experts, top_k, torch.float32)
    ours, megatrons = outcome(OURS, given, top_k), outcome(MEGATRONS, given, top_k)
    for name, value in ours.items():
        assert torch.equal(value.view(torch.int32), megatrons[name].view(torch.int32)), name


def test_bfloat16_rounds_once_forward_and_backward() -> None:
    top_k = 8
    given = layer(128, top_k, torch.bfloat16)
    ours = outcome(OURS, given, top_k)
    token_of_row, rows_of_token = layer_functions.permute(
        given.tokens, given.routing_map, given.probs, TOKENS * top_k
    )[2]
    of_token = rows_of_token.view(TOKENS, top_k)
    copied = given.gradient[token_of_row].double() * slopes(given)
    # A CPU adds in float32 in Megatron's functions too; each atomic addition of a GPU rounds.
    for name, rows in (("output", ours["scaled"]), ("tokens", copied.bfloat16())):
        exact = rows[of_token].double().sum(1)
        least = relative_error(exact.bfloat16(), exact)  # 1.65e-3
        assert relative_error(ours[name], exact) < 1.02 * least, name
        one_by_one = sum(rows[of_token].unbind(1), torch.zeros_like(given.tokens))
        assert relative_error(one_by_one, exact) > 1.6 * least, "2.8e-3"


def test_the_order_of_tokens_changes_no_bit() -> None:
    top_k = 8
    given = layer(32, top_k, torch.bfloat16)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    before, after = outcome(OURS, given, top_k), outcome(OURS, given.of(order), top_k)
    for name in ("output", "tokens", "probs"):
        assert torch.equal(before[name][order], after[name]), name


def test_no_sum_depends_on_an_order_and_nothing_waits() -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if max((x.dim() for x in args if torch.is_tensor(x)), default=0) > 1:
                names.add(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    names: set[str] = set()
    given = layer(32, 4, torch.bfloat16)
    with Names():
        outcome(OURS, given, 4)
    assert not names & {"nonzero", "masked_select", "index_add", "index_add_", "scatter_add", "scatter_add_"}
    assert "_embedding_bag_forward_only" in names or "_embedding_bag" in names


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_chunks_of_ranks_are_sorted_as_megatron_does_and_not_copied_in_order(num_ranks: int) -> None:
    sizes = torch.tensor([3, 1, 0, 4, 2, 5, 1, 2])  # of each rank and expert
    rows, probs = torch.randn(18, HIDDEN), torch.randn(18)
    chunks = torch.arange(8)
    for order in (chunks.view(num_ranks, -1).T.ravel(), chunks.view(-1, num_ranks).T.ravel()):
        sort: Any = layer_functions.sort_chunks_by_idxs
        expected: Any = megatron.sort_chunks_by_idxs(rows, sizes, order, probs=probs)
        found = sort(rows, sizes, order, probs=probs)
        assert all(map(torch.equal, found, expected))
        assert (found[0] is rows and found[1] is probs) == (num_ranks == 1)
        assert sort(rows, sizes, order)[1] is None


def test_dropped_tokens_are_left_to_megatron() -> None:
    given = layer(8, 2, torch.float32)
    arguments: Any = (given.tokens, given.routing_map, given.probs)
    rows, _, indices, *_ = layer_functions.permute(*arguments, num_out_tokens=torch.tensor(TOKENS * 2))
    assert indices.shape == (TOKENS * 2,), "Megatron's: one token for each row"
    whole = layer_functions.unpermute(rows, indices, given.tokens.shape)
    assert torch.allclose(whole, 2 * given.tokens)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.detach().double() - exact.detach()).norm() / exact.detach().norm())
