"""Replaces functions of Megatron's layers: moving tokens to experts and back, and rotary embedding.

Megatron sums over a token's experts with `scatter_add_`, and in the backward pass with `index_add`. On a GPU
each addition rounds to the activations' dtype, and the order is arbitrary. Here each token gathers its top-k
rows, adds them in float32 in the order of expert ids, and rounds once. Nothing waits for the device. Megatron
then sorts the rows that each rank sent by expert. If one rank has all experts, the rows are in order already,
and this module does not copy them.

Megatron's rotation slices its table sequence by sequence in each layer, which waits for the device, and rounds
cosines and sines to the activations' dtype. Here a micro-batch has one table, and layers rotate in float32.
"""

import inspect
from typing import Any

import megatron.core.transformer.attention as attention
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.transformer.multi_latent_attention as multi_latent_attention
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from torch import Tensor

_megatron_permute, _megatron_unpermute = moe_utils.permute, moe_utils.unpermute
_megatron_sort_chunks = moe_utils.sort_chunks_by_idxs
_megatron_rotation = attention.apply_rotary_pos_emb
_NUM_RETURNED = 5 if "tokens_per_expert" in inspect.signature(_megatron_permute).parameters else 3


def install() -> None:
    """Replace the functions of Megatron's token dispatchers and attentions."""
    for function in (permute, unpermute, sort_chunks_by_idxs):
        setattr(token_dispatcher, function.__name__, function)
    for module in (attention, multi_latent_attention):
        setattr(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)  # noqa: B010 - a name that it imported


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


def share_rotary_table(model: Any) -> None:
    """Give all layers of a GPT model one table for each micro-batch, of latent attention too."""
    if not model.config.multi_latent_attention:
        model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb)
        return
    attentions = [layer.self_attention for layer in model.decoder.layers]
    shared = LatentRotary(attentions[0].rotary_pos_emb)
    for each in attentions:
        each.rotary_pos_emb = shared


class PackedRotary(torch.nn.Module):
    """Gives all layers of a model one table for each micro-batch: [T, 1, 2, D] float32, cosines and sines.

    Sines are negative in the first half of a row, as `rotate` expects. D is the rotated part of a head.
    """

    def __init__(self, angles: Any) -> None:
        """Take Megatron's embedding, whose `get_emb` gives the angles of all positions, [longest, 1, 1, D].

        YaRN's gives a factor on cosines and sines besides. Its `forward` would be cached for the process, and
        keep this model's process groups, with their threads, from ending.
        """
        super().__init__()
        self.angles = angles

    def get_rotary_seq_len(self, *arguments: Any, **_: Any) -> Any:
        """Return the packing, the last argument, which Megatron then gives to `forward` as a length."""
        return arguments[-1]

    def forward(self, packing: Any, **_: Any) -> Any:
        """Return the table for `packing.position_ids`, [T] int64, all below `packing.max_seqlen_q`."""
        return self.table(packing)

    def table(self, packing: Any) -> Tensor:
        """Make the table."""
        found = self.angles.get_emb(packing.max_seqlen_q)
        angles, scale = found if isinstance(found, tuple) else (found, 1.0)
        sines, negative = angles.sin(), angles.shape[-1] // 2
        sines[..., :negative].neg_()
        table = torch.cat([angles.cos(), sines], dim=-2)
        return (table if scale == 1.0 else table * scale).index_select(0, packing.position_ids)


class LatentRotary(PackedRotary):
    """The same for latent attention, whose layers ask one after another: the packing keeps the table."""

    def forward(self, packing: Any, **_: Any) -> Any:
        """Return the table, with a factor that remains to be applied where Megatron expects YaRN's."""
        if packing.rotary_table is None:
            packing.rotary_table = self.table(packing)
        is_yarn = isinstance(self.angles, YarnRotaryEmbedding)
        return (packing.rotary_table, 1.0) if is_yarn else packing.rotary_table


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config: Any, *given: Any, mscale: float = 1.0, **options: Any
) -> Tensor:
    """Rotate queries or keys [T, heads, D], as Megatron's function of that name.

    Args:
        t: Queries or keys.
        freqs: The table of `PackedRotary`; Megatron's table if Transformer Engine's kernel rotates.
        config: Config of the model.
        given: Megatron's further arguments.
        mscale: Factor on cosines and sines.
        options: Megatron's further arguments.
    """
    if config.apply_rope_fusion:
        return _megatron_rotation(t, freqs, config, *given, mscale=mscale, **options)
    assert mscale == 1.0, "the table holds the factor"
    if config.multi_latent_attention:  # its pairs are adjacent; queries and keys are permuted in the same way
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    return _Rotation.apply(t, freqs)


def rotate(t: Tensor, table: Tensor, *, is_back: bool = False) -> Tensor:
    """Rotate [T, heads, D] by a table [T, 1, 2, R], or back, in float32; rounded once to the dtype of `t`.

    The first R columns are rotated, and others returned as they are.
    """
    cosines, sines = table.unbind(-2)
    width, result = table.shape[-1], torch.empty_like(t)
    part = t[..., :width]
    along, across = part * cosines, part.roll(width // 2, -1) * sines
    torch.add(along, across, alpha=-1 if is_back else 1, out=result[..., :width])
    if width < t.shape[-1]:
        result[..., width:] = t[..., width:]
    return result


class _Rotation(torch.autograd.Function):
    """A rotation; its gradient is the gradient rotated back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return rotate(t, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (table,) = ctx.saved_tensors
        return rotate(gradients[0], table, is_back=True), None
