"""Runs micro-batches through the model and its output head: forward, loss or log-probs, and backward."""

# Megatron has no stubs, and annotates few functions.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Integer, Shaped
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.data.batches.packing import TokenSlice, token_slice, zigzag
from megatron_dppo.data.batches.prefixes import RepeatedRows, SharedPrefixes, tokens_in_loss
from megatron_dppo.kernels import (
    FusedPolicyLoss,
    packed_linear_policy_loss,
    packed_policy_loss,
    score_norms,
    token_log_probs,
)
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.reference import TokenLogProbs
from megatron_dppo.kernels.shards import PackedResponses
from megatron_dppo.mcore.fixes import release_last_microbatch
from megatron_dppo.mcore.groups import (
    context_parallel_group,
    sequence_parallel_rows,
    sum_over_tokens_and_stages,
    vocab_shard,
)
from megatron_dppo.models.attention import PackedSequences, attention_form, head_dim_of
from megatron_dppo.models.delta_net import chunks_of
from megatron_dppo.models.packed_attention import Spans
from megatron_dppo.routing_replay.replay import Recording
from megatron_dppo.routing_replay.routes import index_dtype
from megatron_dppo.types import Microbatch, RoutedExperts, each_token


@dataclass(frozen=True, eq=False)
class View:
    """Which tokens of a micro-batch this rank forwards, and which rows its loss has: places, without values.

    If prefixes are shared, only tokens in the loss have rows: a prefix would have them for each sequence.
    """

    slice: TokenSlice  # this rank's part of the tokens
    spans: Spans  # what attends to what
    rows: RepeatedRows | None = None  # forwarded token of each row; None: they are the same
    prefixes: SharedPrefixes | None = None
    places: Int[Tensor, " rows"] | None = None  # of the rows in the complete micro-batch

    @classmethod
    def of(cls, microbatch: Microbatch, shares_prefixes: bool = False) -> "Part":
        """Return this rank's part of a complete micro-batch, on the host.

        `shares_prefixes`: forward each prefix once that several sequences begin with; they must not be split
        over context-parallel ranks.
        """
        prefixes = SharedPrefixes.of(microbatch) if shares_prefixes else None
        rank = cast(int, parallel_state.get_context_parallel_rank())
        size = cast(int, parallel_state.get_context_parallel_world_size())
        tensor = cast(int, parallel_state.get_tensor_model_parallel_world_size())
        if prefixes is None:
            own = token_slice(microbatch, rank, size, tensor)
            local = own.local(microbatch)
            cu_seqlens = local.cu_seqlens.cpu()
            spans = Spans.of_pieces(cu_seqlens, rank, size) if size > 1 else Spans.of_sequences(cu_seqlens)
            return cls(own, spans), local, local
        assert size == 1, "the checks refuse shared prefixes with context parallelism"
        distinct = prefixes.distinct(microbatch)
        own = token_slice(distinct, rank, size, tensor)
        local = own.local(distinct)
        num_tokens, num_queries = local.tokens.numel(), local.cu_seqlens.diff().long()
        padding = torch.arange(distinct.tokens.numel(), num_tokens)  # follows the last part, which has queries
        num_keys = prefixes.num_keys(microbatch)
        num_keys[-1] += padding.numel()
        keys = RepeatedRows.of(torch.cat([prefixes.keys(microbatch), padding]), num_tokens)
        places, scored = tokens_in_loss(microbatch)
        rows = RepeatedRows.of(prefixes.sources[places], num_tokens)
        return cls(own, Spans(num_queries, num_keys, keys), rows, prefixes, places), local, scored

    def of_tokens(self, values: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "T ..."]:
        """Return values of the rows of the loss for the tokens of the complete micro-batch, 0 elsewhere."""
        if self.prefixes is None or self.places is None:
            return self.slice.scattered(values)
        whole = values.new_zeros((self.prefixes.sources.numel(), *values.shape[1:]))
        return whole.index_copy_(0, self.places, values)

    def recorded_routes(self, recorded: Recording, index: int, device: torch.device) -> RoutedExperts:
        """Return the routes that all ranks recorded of this micro-batch, the `index`-th, on the host."""
        num_rows = self.slice.own.numel()
        own = self.slice.scattered(recorded.rows(index, num_rows, sequence_parallel_rows(num_rows)))
        own = own if self.prefixes is None else own[self.prefixes.sources]
        whole = sum_over_tokens_and_stages(own.to(device), over_tensor=True).cpu()
        routing, dtype = recorded.routing, index_dtype(recorded.routing.num_experts)
        return RoutedExperts(whole.to(dtype), routing.layer_numbers, routing.num_experts)

    def num_learning(self, scored: Microbatch) -> Integer[Tensor, " tokens"]:
        """Return the number of rows of the loss in which each forwarded token learns."""
        mask = scored.loss_mask
        return mask.long() if self.rows is None else self.rows.summed(mask.float()).long()


Part = tuple[View, Microbatch, Microbatch]
"""A view; the tokens that the model gets (`cu_seqlens` of all context-parallel ranks); the rows of the loss."""

LossFunction = Callable[
    [Float[Tensor, "rows columns"], Microbatch, RepeatedRows | None],
    tuple[Float[Tensor, ""], Int[Tensor, ""], dict[str, Any]],
]
"""From the output of a micro-batch, the rows of the loss and the token of each (None: row t is of token t):
(sum of the loss, number of learning tokens, what to report)."""


def run_microbatches(
    chunks: Sequence[torch.nn.Module],
    parts: Sequence[Part],
    loss_function: LossFunction,
    *,
    device: torch.device,
    before_forward: Callable[[int, Part], None] | None = None,
    forward_only: bool = False,
) -> None:
    """Accumulate gradients over the micro-batches; Megatron divides by the global number of learning tokens.

    Args:
        chunks: This rank's part of the Megatron model, wrapped for data parallelism: one per virtual stage.
        parts: This rank's part of each micro-batch, on the host; every rank has the same number.
        loss_function: Called with the logits of each micro-batch, on the last pipeline stage.
        device: The model's.
        before_forward: Called with a chunk's index and a micro-batch before that chunk forwards it.
        forward_only: No gradients.
    """

    def forward_step(
        data: Iterator[tuple[int, Part, PackedSequences]], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        index, part, packing = next(data)
        view, tokens, scored = part
        if before_forward is not None:
            before_forward(index, part)
        output = forward_packed(chunk, tokens, packing)

        def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return loss_function(output.squeeze(0), scored, view.rows)

        return output, loss_of

    moved = [(_moved(part, device), packing_of(part, chunks[0], device)) for part in parts]
    iterators = [iter([(index, *each) for each in moved]) for index in range(len(chunks))]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(parts),
        seq_length=max(tokens.tokens.numel() for _, tokens, _ in parts),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    release_last_microbatch(chunks)


def _moved(part: Part, device: torch.device) -> Part:
    view, tokens, scored = part
    tokens = to_device(tokens, device)
    scored = tokens if view.rows is None else to_device(scored, device)
    return replace(view, rows=to_device(view.rows, device)), tokens, scored


def packing_of(part: Part, chunk: torch.nn.Module, device: torch.device) -> PackedSequences:
    """Build the packing parameters that the layers need, on the host, and move them to `device`.

    Args:
        part: This rank's part of a micro-batch, on the host.
        chunk: Chunk of the model; its dtype and head size decide how attention is computed.
        device: The model's.
    """
    config = cast(TransformerConfig, get_model_config(chunk))
    view, tokens, _ = part
    form = attention_form(device.type, config.params_dtype, head_dim_of(config))
    longest = max(tokens.max_seqlen, int(view.spans.num_keys.max()))
    is_split = cast(int, parallel_state.get_context_parallel_world_size()) > 1
    chunks = chunks_of(config, view.spans, device.type)
    return to_device(
        PackedSequences.of(tokens, view.spans, longest, form, is_split=is_split, chunks=chunks), device
    )


def forward_packed(
    chunk: torch.nn.Module, microbatch: Microbatch, packing: PackedSequences | None = None
) -> Tensor:
    """Return [1, T, V] logits of packed sequences (this rank's columns), or the next stage's hidden states.

    `packing` is of `packing_of`; None: complete sequences.
    """
    packing = packing or packing_of(View.of(microbatch), chunk, microbatch.tokens.device)
    output: Tensor = chunk(
        microbatch.tokens[None], microbatch.position_ids[None], None, packed_seq_params=packing
    )
    return output


def to_device(value: Any, device: torch.device) -> Any:
    """Return a tensor, or a tuple or dataclass of them such as a micro-batch, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(to_device(each, device) for each in cast(tuple[Any, ...], value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: to_device(getattr(value, f.name), device) for f in fields(value)})
    return value


class OutputHead:
    """Computes the loss from the output layer's input or from its logits, as set by `loss_from`."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        objective: Objective,
        options: AlgorithmConfig,
        *,
        temperature: float,
        vocab_size: int,
        reported_topk: int = 0,
    ) -> None:
        """Replace the output layer's forward, unless the loss comes from logits.

        Args:
            chunks: This rank's part of the model; the last has the output layer, on the last pipeline stage.
            objective: Training objective.
            options: Settings of the loss.
            temperature: Divisor of the logits, as in the sampler.
            vocab_size: Size without the padding of the output layer.
            reported_topk: Number of the rollout's Top-K columns whose log-probs the loss reports, if the
                objective itself needs none.
        """
        self._last: Any = chunks[-1]
        self._objective, self._reported_topk = objective, reported_topk
        self._layer = OutputLayer(vocab_shard(vocab_size), temperature, options.loss_from != "hidden_states")
        if not self._layer.is_applied:
            self._layer = replace(
                self._layer,
                is_sequence_parallel=self._last.config.sequence_parallel,
                chunk_bytes=options.logits_chunk_bytes,
                logits_dtype=torch.float32 if options.logits_dtype == "float32" else None,
            )
            if self._last.post_process:
                self._last.output_layer.forward = _pass_on

    def policy_loss(
        self,
        output: Float[Tensor, "tokens columns"],
        microbatch: Microbatch,
        rows: RepeatedRows | None = None,
    ) -> FusedPolicyLoss:
        """Compute the loss of a micro-batch; one backward pass must follow if gradients are enabled.

        Args:
            output: [tokens, V/tp] logits, or the hidden states before them: [tokens, H], [tokens/tp, H] with
                sequence parallelism.
            microbatch: The T rows of the loss.
            rows: Token of each row, if some tokens have several; None: one row for each token.

        Raises:
            ConfigError: A learning token has an invalid value.
        """
        responses = packed_responses(microbatch) if self._objective.needs_responses else None
        topk = microbatch.topk if self._objective.needs_topk or self._reported_topk else None
        if topk is not None and not self._objective.needs_topk:
            topk = each_token(topk, lambda columns, _: columns[:, : self._reported_topk])
        tokens = replace(microbatch, topk=topk)
        output, layer = self._of_rows(output, rows)
        inputs = (tokens, self._objective, layer, responses)
        if layer.is_applied:
            return packed_policy_loss(output, *inputs, inplace_backward=True)
        loss_scale = self._loss_scale(output.device)
        return packed_linear_policy_loss(output, self._weight, *inputs, loss_scale=loss_scale)

    def log_probs(
        self,
        output: Float[Tensor, "tokens columns"],
        microbatch: Microbatch,
        rows: RepeatedRows | None = None,
        *,
        has_topk: bool,
        has_score_norms: bool,
        temperature: float | None,
    ) -> TokenLogProbs:
        """Compute log pi of the targets, and with `has_topk` of the rollout's top-K, without gradient.

        `has_score_norms`: compute the logits again, and the norm of d log pi / d h for each target (h: the
        output layer's input). Logits are divided by `temperature`, or by the sampler's.
        """
        output, layer = self._of_rows(output, rows)
        if temperature is not None:
            layer = replace(layer, temperature=temperature)
        inputs, mask = (output, self._weight, microbatch.targets, layer), microbatch.loss_mask
        ids = microbatch.topk_ids if has_topk else None
        norms = score_norms(*inputs, loss_mask=mask) if has_score_norms else None
        return replace(token_log_probs(*inputs, loss_mask=mask, topk_ids=ids), score_norms=norms)

    def _of_rows(
        self, output: Float[Tensor, "tokens columns"], rows: RepeatedRows | None
    ) -> tuple[Float[Tensor, "rows columns"], OutputLayer]:
        """Return the output of each row of the loss, and how the output layer is applied to it."""
        layer = self._layer
        if rows is None:
            return output, layer
        if layer.is_sequence_parallel:
            # The loss sums the gradient over ranks, so that each rank only takes its own tokens' part of it.
            gathered = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=layer.shard.group
            )
            output = cast(Tensor, gathered)
            layer = replace(layer, is_sequence_parallel=False)
        return rows.take(output), layer

    def nothing(self, output: Float[Tensor, "rows columns"]) -> Float[Tensor, ""]:
        """Return a loss of 0 that reaches every parameter which a real one would."""
        return output.sum() * 0.0 + self._weight.sum() * 0.0

    def _loss_scale(self, device: torch.device) -> Tensor:
        """Return the factor by which Megatron's schedule multiplies the loss before its backward pass."""
        one = torch.ones((), device=device)
        scale = self._last.config.grad_scale_func
        return one if scale is None else scale(one)

    @property
    def _weight(self) -> Tensor:
        return output_weight(self._last)


def packed_responses(microbatch: Microbatch) -> PackedResponses:
    """Return the places of responses, learning tokens of sequences, over all context-parallel ranks."""
    rank_group = context_parallel_group()
    lengths = microbatch.cu_seqlens.diff().long()
    if rank_group is None:
        return PackedResponses(lengths)
    starts, size = lengths.cumsum(0) - lengths, rank_group.size()
    order = torch.cat([zigzag(starts, lengths, rank, size) for rank in range(size)])
    return PackedResponses(lengths, rank_group, order)


def output_weight(chunk: Any) -> Float[Tensor, "V H"]:
    """Return this rank's output weight, of the last chunk; it may be shared with the embedding."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight


def _pass_on(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Pass the output layer's input through."""
    return hidden, None
