"""Moves tokens to their experts and back, with sums over a token's experts in float32 and in a fixed order.

Megatron's own functions sum with `scatter_add_`, and in the backward pass with `index_add`. On a GPU each
addition rounds to the activations' dtype, and the order is arbitrary. Here each token gathers its top-k rows,
adds them in float32 in the order of expert ids, and rounds once. Nothing waits for the device.

Megatron then sorts the rows that each rank sent by expert. If one rank has all experts, the rows are in order
already, and this module does not copy them.
"""

import inspect
from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch.nn.functional as F
from torch import Tensor

_megatron_permute, _megatron_unpermute = moe_utils.permute, moe_utils.unpermute
_megatron_sort_chunks = moe_utils.sort_chunks_by_idxs
_NUM_RETURNED = 5 if "tokens_per_expert" in inspect.signature(_megatron_permute).parameters else 3


def install() -> None:
    """Replace the functions of Megatron's token dispatchers."""
    setattr(token_dispatcher, "permute", permute)  # noqa: B010 - a name that the module imported
    setattr(token_dispatcher, "unpermute", unpermute)  # noqa: B010
    setattr(token_dispatcher, "sort_chunks_by_idxs", sort_chunks_by_idxs)  # noqa: B010


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Copy each token to its experts' rows, as Megatron's function of that name.

    The all-to-all dispatcher that drops no token knows on the host how many rows there are: top-k for each.
    Other dispatchers, dropped tokens and Transformer Engine's kernels use Megatron's function. DeepEP's
    dispatcher has tokens with any number of experts on a rank, so it is accepted only with these kernels.

    Args:
        tokens: [T, H].
        routing_map: [T, experts] bool, top-k of each row.
        probs: [T, experts], 0 if the map is False.
        num_out_tokens: T * top-k; a tensor if tokens are dropped.
        fused: Whether to use Transformer Engine's kernel.
        drop_and_pad: Whether experts have a capacity, up to which they are padded.
        options: Further arguments of newer Megatron versions.

    Returns:
        [N, H] and [N] sorted by expert, then by token; for `unpermute` [2, N], the token of each row and the
        rows of each token; and the further results of newer versions.
    """
    if probs is None or fused or drop_and_pad or options or not isinstance(num_out_tokens, int):
        size: Any = num_out_tokens  # annotated as int, and given as a tensor too
        return _megatron_permute(
            tokens, routing_map, probs, size, fused=fused, drop_and_pad=drop_and_pad, **options
        )
    num_tokens = tokens.shape[0]
    places = torch.nonzero_static(routing_map.T.flatten(), size=num_out_tokens)[:, 0]  # expert * T + token
    token_of_row = places % num_tokens
    rows_of_token = token_of_row.argsort(stable=True)
    rows = _Rows.apply(tokens, token_of_row, rows_of_token.view(num_tokens, -1))
    row_probs = probs.T.flatten().gather(0, places)  # its backward pass meets each place once
    return rows, row_probs, torch.stack([token_of_row, rows_of_token]), *[None] * (_NUM_RETURNED - 3)


def unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: torch.Size, *given: Any, **options: Any
) -> Tensor:
    """Return [T, H], the sum of each token's rows in [N, H], after a `permute` that returned `sorted_indices`.

    Args:
        permuted_tokens: [N, H], weighted by their probabilities.
        sorted_indices: The indices that `permute` returned.
        restore_shape: (T, H).
        given: Megatron's further arguments.
        options: Megatron's further arguments.
    """
    if options.get("fused") or sorted_indices.dim() != 2:  # from Transformer Engine's or Megatron's own
        return _megatron_unpermute(permuted_tokens, sorted_indices, restore_shape, *given, **options)
    token_of_row, rows_of_token = sorted_indices
    return _Sums.apply(permuted_tokens, token_of_row, rows_of_token.view(restore_shape[0], -1))


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Any, Any]:
    """Put chunks of rows in another order, as Megatron's function of that name; rows in order are returned.

    Args:
        input: [N, H].
        split_sizes: [C] int64 rows of each chunk.
        sorted_idxs: [C] int64 chunks in their new order, on the host unless `fused`.
        probs: [N].
        fused: Whether to use Transformer Engine's kernel.

    Returns:
        [N, H], and [N] if `probs` were given.
    """
    if not fused:
        order: list[int] = sorted_idxs.tolist()
        if order == sorted(order):
            return input, probs
    return _megatron_sort_chunks(input, split_sizes, sorted_idxs, probs=probs, fused=fused)


def sum_of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return [T, H]: sums of the given `rows` [T, k] of `values` [N, H], added in that order in float32."""
    return F.embedding_bag(rows, values.contiguous(), mode="sum")  # one kernel, a thread for each element


class _Rows(torch.autograd.Function):
    """Copies of tokens; the backward pass sums the copies' gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of_token)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows_of_token,) = ctx.saved_tensors
        return sum_of_rows(gradients[0], rows_of_token), None, None


class _Sums(torch.autograd.Function):
    """Sums of copies; the backward pass copies the sums' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, rows_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return sum_of_rows(rows, rows_of_token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return gradients[0].index_select(0, token_of_row), None, None
