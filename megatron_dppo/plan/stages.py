"""Splits the model into pipeline stages, and estimates states and activations on a rank of a stage.

Megatron's distributed optimizer keeps the parameters and gradients of a model chunk in buffers: each
tensor starts at a multiple of 64 elements, and a buffer's end is padded so that it divides over the ranks that
share it. Dense parameters are shared by data x context ranks, and split experts by expert-data-parallel ranks.
With LoRA the buffers contain adapters, and the model's frozen weights are outside of them.

Logits are counted as on a GPU, where kernels work in place. If the loss is computed from hidden states, logits
and their gradients exist only for some tokens at a time. The weight's gradient is added to Megatron's buffer at
once, and the hidden states' gradient is freed when backward has passed the loss. If the loss is computed from
logits, the logits of all tokens exist, and their gradient overwrites them. Every token is assumed to be in the
loss: other tokens have no logits in the first form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_dppo.architectures.layout import Layout, layers_of_stages
from megatron_dppo.architectures.parameters import (
    Adapters,
    Chunk,
    ModelShape,
    Tensor,
    adapter_tensors,
    chunk_tensors,
    padded_vocab,
)
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.plan.activations import FLOAT, LayerModel, LayerTokens, kept_by_layers
from megatron_dppo.plan.job import Job

ALIGN_START, ALIGN_END = 64, 128  # elements, of megatron.core's parameter and gradient buffers
GRADIENT_BYTES = 4  # grad_reduce_in_fp32
MASTER_BYTES = 4
MOMENT_BYTES = 4
STORED_BYTES = MASTER_BYTES + 2 * MOMENT_BYTES  # of each element in a checkpoint, of float32 parameters too
STATISTICS = 4  # float32 numbers per token on each shard, in addition to its top-K
ROWS = 11  # float32 numbers per token that the loss keeps: log-prob, entropy, ratio and similar ones
ROW_MULTIPLE = 128  # chunks of at least this size have a multiple of it as tokens
CHUNK_INPUTS = 2  # copies of a chunk's hidden states besides its logits: input of the product, and gradient


@dataclass(frozen=True)
class Elements:
    """Number of elements of some of a rank's trained parameters."""

    own: int  # without padding
    buffer: int  # with padding: size of the parameters' and of the gradients' buffer
    shard: int  # this rank's part for the optimizer, including padding
    sharers: int  # number of ranks with the same parameters


@dataclass(frozen=True)
class StagePart:
    """Part of the model on a rank of one pipeline stage."""

    stage: int  # 0-based
    chunks: tuple[Chunk, ...]  # one, or one for each virtual stage
    dense: Elements
    expert: Elements  # split experts; unsplit experts count as dense
    largest: int  # elements of the largest tensor
    largest_trained: int  # elements of the largest tensor with a gradient
    frozen: int = 0  # elements without a gradient

    @property
    def buffer(self) -> int:
        """Number of elements in the gradient buffers."""
        return self.dense.buffer + self.expert.buffer

    @property
    def weights(self) -> int:
        """Number of elements of all parameters, padding included."""
        return self.buffer + self.frozen

    @property
    def shard(self) -> int:
        """Number of elements with optimizer states on this rank."""
        return self.dense.shard + self.expert.shard


def chunks_of(stage: int, layout: Layout, num_layers: int) -> tuple[Chunk, ...]:
    """Return the model chunks of a stage, in order: one, or with interleaving several of equal size.

    Stages count from 0. With interleaving, the chunks divide the layers.
    """
    if layout.virtual_pipeline == 1:
        of_stages = layers_of_stages(num_layers, layout.pipeline)
        assert of_stages is not None, "layouts that leave a stage empty are refused before they are planned"
        start = sum(of_stages[:stage])
        own = range(start, start + of_stages[stage])
        return (Chunk(own, own.start == 0, own.stop == num_layers),)
    of_chunk, rest = divmod(num_layers, layout.pipeline * layout.virtual_pipeline)
    assert not rest, "layouts that do not divide the layers are refused before they are planned"
    starts = [(index * layout.pipeline + stage) * of_chunk for index in range(layout.virtual_pipeline)]
    return tuple(
        Chunk(range(start, start + of_chunk), start == 0, start + of_chunk == num_layers) for start in starts
    )


def stage_parts(job: Job, layout: Layout) -> tuple[StagePart, ...]:
    """Return the part of a job's model on each pipeline stage of a layout."""
    lora = job.config.lora
    adapters = Adapters(lora.rank, lora.targets) if lora.rank else None
    return partition(job.shape, layout, job.config.optimizer.distributed, adapters)


@lru_cache(maxsize=4096)
def partition(
    shape: ModelShape, layout: Layout, is_distributed: bool, adapters: Adapters | None = None
) -> tuple[StagePart, ...]:
    """Return the parts of all pipeline stages; `adapters`, if any, are trained instead of the weights."""
    parts: list[StagePart] = []
    alike: dict[object, StagePart] = {}
    for stage in range(layout.pipeline):
        chunks = chunks_of(stage, layout, shape.sizes.num_layers)
        kind = tuple((c.is_first, c.is_last, *sorted(map(shape.kind, c.layers))) for c in chunks)
        if kind not in alike:
            alike[kind] = _part(shape, layout, stage, chunks, is_distributed, adapters)
        parts.append(replace(alike[kind], stage=stage, chunks=chunks))
    return tuple(parts)


def _part(
    shape: ModelShape,
    layout: Layout,
    stage: int,
    chunks: tuple[Chunk, ...],
    is_distributed: bool,
    adapters: Adapters | None,
) -> StagePart:
    held = [chunk_tensors(shape, layout, chunk) for chunk in chunks]
    trained = held
    if adapters is not None:
        trained = [adapter_tensors(shape, layout, chunk, adapters) for chunk in chunks]
    num_expert_sharers = layout.world_size // (layout.expert * layout.expert_tensor * layout.pipeline)
    return StagePart(
        stage=stage,
        chunks=chunks,
        dense=_elements(
            [bucket for tensors in trained for bucket in _dense_buckets(tensors)],
            layout.data * layout.context,
            is_distributed,
        ),
        expert=_elements(
            [[t.numel for t in tensors if t.is_expert] for tensors in trained],
            num_expert_sharers,
            is_distributed,
        ),
        largest=_largest(held),
        largest_trained=_largest(trained),
        frozen=sum(t.numel for tensors in held for t in tensors) if trained is not held else 0,
    )


def _largest(chunks: Sequence[Sequence[Tensor]]) -> int:
    return max(tensor.numel for tensors in chunks for tensor in tensors)


def _dense_buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the tensors' sizes in elements, by bucket; a shared embedding has its own bucket."""
    shared = [[t.numel] for t in tensors if t.is_shared_embedding]
    return [[t.numel for t in tensors if not (t.is_expert or t.is_shared_embedding)], *shared]


def _elements(buckets: Sequence[Sequence[int]], sharers: int, is_distributed: bool) -> Elements:
    own = sum(map(sum, buckets))
    if not is_distributed:
        return Elements(own, own, own, sharers)
    end = math.lcm(sharers, ALIGN_END)
    buffer = sum(_up(sum(_up(numel, ALIGN_START) for numel in bucket), end) for bucket in buckets)
    return Elements(own, buffer, buffer // sharers, sharers)


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor


@dataclass(frozen=True)
class RankStates:
    """Bytes on one rank that do not depend on tokens."""

    parameters: int
    gradients: int
    optimizer: int  # during its step, and in a checkpoint
    optimizer_between: int  # part of `optimizer` on the GPU outside of the step
    optimizer_on_host: int  # part of `optimizer` on the host outside of the step
    checkpoint: int  # copied to the host by an asynchronous save
    checkpoint_pieces: int  # part of `checkpoint` on the host in any save: parameters in several ranks' shards
    step_temporaries: int  # temporary bytes of the optimizer's step on the GPU
    largest_parameter: int
    largest_gradient: int  # before it is added to its buffer


def rank_states(job: Job, part: StagePart) -> RankStates:
    """Return the state bytes of a rank with this part of the model."""
    dtype_bytes, is_offloading = job.workload.dtype_bytes, job.config.optimizer.offload
    whole = optimizer_bytes(part.shard, dtype_bytes)
    is_distributed = job.config.optimizer.distributed
    stored = STORED_BYTES if is_distributed else optimizer_bytes(1, dtype_bytes)
    # A rank writes its shard and at most one more parameter per optimizer: mcore/training_states.py.
    pieces = (
        is_distributed
        * part.largest_trained
        * sum(each.sharers > 1 for each in (part.dense, part.expert) if each.own)
    )
    owned = min(part.shard + pieces, part.buffer)
    return RankStates(
        parameters=part.weights * dtype_bytes,
        gradients=part.buffer * GRADIENT_BYTES,
        optimizer=whole,
        optimizer_between=0 if is_offloading else whole,
        optimizer_on_host=whole * is_offloading,
        checkpoint=owned * (dtype_bytes + stored) + part.frozen * dtype_bytes,
        checkpoint_pieces=pieces * stored,
        step_temporaries=part.shard * GRADIENT_BYTES,  # AdamW's square roots, all at once
        largest_parameter=part.largest * dtype_bytes,
        largest_gradient=part.largest_trained * dtype_bytes,
    )


def optimizer_bytes(num_elements: int, dtype_bytes: int) -> int:
    """Return the bytes of Adam's states: two float32 moments, and a float32 copy of 16-bit parameters."""
    master = MASTER_BYTES if dtype_bytes < MASTER_BYTES else 0
    return num_elements * (master + 2 * MOMENT_BYTES)


@dataclass(frozen=True)
class StageActivations:
    """Bytes of activations on one rank of a stage, without the allocator's losses."""

    held: int  # kept by layers from forward to backward, for all micro-batches in flight
    head: int  # kept by the final norm, with its result, until backward reaches the layers
    again: int  # recomputed activations, while one recomputed layer is in backward
    working: int  # temporary tensors in forward or backward of one layer
    passed: int  # tensors that the stage received and sent, for the micro-batches in flight
    logits: int  # logits and the loss's tensors, at the peak


def stage_activations(job: Job, layout: Layout, part: StagePart) -> StageActivations:
    """Return the activation bytes of a rank with this part of the model."""
    work, options = job.workload, job.options
    num_tokens, num_microbatches = work.microbatch_tokens(layout.data), work.num_microbatches(layout.data)
    tree = work.tree(layout.data)
    tokens = LayerTokens.of(num_tokens, layout, num_tokens * tree.num_keys // tree.num_tokens * tree.is_shared)
    model = LayerModel(job.shape, layout, tokens, work.dtype_bytes, options.layer_spec, job.assumptions)
    kept = [kept_by_layers(model, chunk.layers, options.recompute) for chunk in part.chunks]
    flights = chunks_in_flight(part.stage, layout, num_microbatches)
    # A micro-batch goes through all chunks in turn: whole rounds of them, then the largest of what is left.
    rounds, rest = divmod(flights, len(kept))
    by_size = sorted((chunk.held for chunk in kept), reverse=True)
    held = rounds * sum(by_size) + sum(by_size[:rest])
    has_head = part.chunks[-1].is_last
    rows = work.microbatch_rows(layout.data) * tree.is_shared
    of_loss = LossTokens(tokens.attended, work.dtype_bytes, work.topk_columns, rows)
    return StageActivations(
        held=held,
        head=model.mlp_norm() * has_head,
        again=max(chunk.again for chunk in kept),
        working=model.working(),
        passed=flights * 2 * model.hidden_bytes if layout.pipeline > 1 else 0,
        logits=loss_bytes(job.shape, layout, job.config.algorithm, of_loss) * has_head,
    )


def chunks_in_flight(stage: int, layout: Layout, num_microbatches: int) -> int:
    """Return the number of forward passes with kept activations: Megatron's warm-up, and the current one."""
    ahead = layout.pipeline - stage - 1
    virtual = layout.virtual_pipeline
    warm_up = ahead if virtual == 1 else 2 * ahead + (virtual - 1) * layout.pipeline
    return min(warm_up + 1, num_microbatches * virtual)


@dataclass(frozen=True)
class LossTokens:
    """Tokens of one micro-batch in the loss on one rank."""

    num_forwarded: int  # after context parallelism
    dtype_bytes: int  # of an activation
    topk_columns: int
    num_repeated: int = 0  # rows of the loss, if some forwarded tokens have several, and others none

    @property
    def num_tokens(self) -> int:
        """Number of rows."""
        return self.num_repeated or self.num_forwarded


def loss_bytes(shape: ModelShape, layout: Layout, options: AlgorithmConfig, tokens: LossTokens) -> int:
    """Return the peak bytes of the loss of a micro-batch; they are freed before backward of the layers."""
    columns, hidden = padded_vocab(shape, layout) // layout.tensor, shape.sizes.hidden_size
    states = tokens.num_tokens * hidden * tokens.dtype_bytes  # of all tokens: hidden states, or their gradient
    # Hidden states are split over tensor ranks; the rows' states are taken from them.
    gathered = states * (layout.tensor > 1 and not tokens.num_repeated)
    taken = states * (tokens.num_repeated > 0)
    weight = columns * hidden * tokens.dtype_bytes
    statistics = (STATISTICS + tokens.topk_columns) * layout.tensor * FLOAT
    rows = tokens.num_tokens * (ROWS + tokens.topk_columns) * FLOAT
    if options.loss_from == "logits":
        num_logits = tokens.num_tokens + tokens.num_forwarded * (tokens.num_repeated > 0)
        logits = num_logits * columns * tokens.dtype_bytes
        of_layer = gathered + states + weight  # in backward of the output layer
        return logits + rows + max(tokens.num_tokens * statistics, of_layer)
    chunk = min(chunk_tokens(options, columns, tokens.dtype_bytes), tokens.num_tokens)
    wide = logits_bytes(options, tokens.dtype_bytes)
    # A logit's gradient overwrites it, and is copied if the weight is narrower.
    of_token = columns * (wide + tokens.dtype_bytes * (wide > tokens.dtype_bytes))
    of_token += CHUNK_INPUTS * hidden * tokens.dtype_bytes + statistics
    # At the start of backward: what autograd gets in place of the weight's gradient, which is in Megatron's
    # buffer, and this rank's part of that by the hidden states.
    after = weight + gathered // layout.tensor
    return states + taken + rows + max(chunk * of_token + gathered, after)


def chunk_tokens(options: AlgorithmConfig, columns: int, dtype_bytes: int) -> int:
    """Return the number of tokens in a chunk of logits."""
    rows = options.logits_chunk_bytes // (columns * logits_bytes(options, dtype_bytes))
    return max(rows - rows % ROW_MULTIPLE or rows, 1)


def logits_bytes(options: AlgorithmConfig, dtype_bytes: int) -> int:
    """Return the bytes of one logit of a chunk."""
    return max(dtype_bytes, FLOAT if options.logits_dtype == "float32" else 0)
