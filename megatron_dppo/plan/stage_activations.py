"""Estimates activations and logits of one pipeline stage, over the micro-batches in flight.

Logits are counted as on a GPU, where kernels work in place. If the loss is computed from hidden states, logits
and their gradients exist only for some tokens at a time. The weight's gradient is added to Megatron's buffer at
once, and the hidden states' gradient is freed when backward has passed the loss. If the loss is computed from
logits, the logits of all tokens exist, and their gradient overwrites them. Every token is assumed to be in the
loss: other tokens have no logits in the first form.
"""

from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import ModelShape, padded_vocab
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.plan.activations import LayerModel, LayerTokens, kept_by_layers
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.partition import StagePart

FLOAT = 4
STATISTICS = 4  # float32 numbers per token on each shard, in addition to its top-K
ROWS = 11  # float32 numbers per token that the loss keeps: log-prob, entropy, ratio and similar ones
ROW_MULTIPLE = 128  # chunks of at least this size have a multiple of it as tokens
CHUNK_INPUTS = 2  # copies of a chunk's hidden states besides its logits: input of the product, and gradient


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
    tokens = LayerTokens.of(num_tokens, layout)
    model = LayerModel(job.shape, layout, tokens, work.dtype_bytes, options.layer_spec, job.assumptions)
    kept = [kept_by_layers(model, chunk.layers, options.recompute) for chunk in part.chunks]
    flights = chunks_in_flight(part.stage, layout, num_microbatches)
    # A micro-batch goes through all chunks in turn: whole rounds of them, then the largest of what is left.
    rounds, rest = divmod(flights, len(kept))
    by_size = sorted((chunk.held for chunk in kept), reverse=True)
    held = rounds * sum(by_size) + sum(by_size[:rest])
    has_head = part.chunks[-1].is_last
    of_loss = LossTokens(tokens.attended, work.dtype_bytes, work.topk_columns)
    return StageActivations(
        held=held,
        head=model.head() * has_head,
        again=max(chunk.again for chunk in kept),
        working=model.working(),
        passed=flights * 2 * model.hidden_bytes if layout.pipeline > 1 else 0,
        logits=loss_bytes(job.shape, layout, job.config.algorithm, of_loss) * has_head,
    )


def chunks_in_flight(stage: int, layout: Layout, num_microbatches: int) -> int:
    """Return the number of forward passes with kept activations: Megatron's warm-up, and the current one.

    Args:
        stage: 0-based pipeline stage.
        layout: Layout with pipeline and virtual_pipeline.
        num_microbatches: Number of micro-batches in one gradient step.
    """
    ahead = layout.pipeline - stage - 1
    virtual = layout.virtual_pipeline
    warm_up = ahead if virtual == 1 else 2 * ahead + (virtual - 1) * layout.pipeline
    return min(warm_up + 1, num_microbatches * virtual)


@dataclass(frozen=True)
class LossTokens:
    """Tokens of one micro-batch in the loss on one rank."""

    num_tokens: int  # after context parallelism
    dtype_bytes: int  # of an activation
    topk_columns: int


def loss_bytes(shape: ModelShape, layout: Layout, options: AlgorithmConfig, tokens: LossTokens) -> int:
    """Return the peak bytes of the loss of a micro-batch; they are freed before backward of the layers.

    Args:
        shape: Shape of the model.
        layout: Layout; its tensor size splits the vocabulary.
        options: Options of the loss.
        tokens: Tokens of the micro-batch.
    """
    columns, hidden = padded_vocab(shape, layout) // layout.tensor, shape.sizes.hidden_size
    states = tokens.num_tokens * hidden * tokens.dtype_bytes  # of all tokens: hidden states, or their gradient
    gathered = states * (layout.tensor > 1)  # hidden states are split over tensor ranks
    weight = columns * hidden * tokens.dtype_bytes
    statistics = (STATISTICS + tokens.topk_columns) * layout.tensor * FLOAT
    rows = tokens.num_tokens * (ROWS + tokens.topk_columns) * FLOAT
    if options.loss_from == "logits":
        logits = tokens.num_tokens * columns * tokens.dtype_bytes
        of_layer = gathered + states + weight  # in backward of the output layer
        return logits + rows + max(tokens.num_tokens * statistics, of_layer)
    chunk = min(chunk_tokens(options, columns, tokens.dtype_bytes), tokens.num_tokens)
    of_token = columns * _logit_bytes_with_gradient(options, tokens.dtype_bytes)
    of_token += CHUNK_INPUTS * hidden * tokens.dtype_bytes + statistics
    # At the start of backward: what autograd gets in place of the weight's gradient, which is in Megatron's
    # buffer, and this rank's part of that by the hidden states.
    after = weight + gathered // layout.tensor
    return states + rows + max(chunk * of_token + gathered, after)


def chunk_tokens(options: AlgorithmConfig, columns: int, dtype_bytes: int) -> int:
    """Return the number of tokens in a chunk of logits."""
    rows = options.logits_chunk_bytes // (columns * logits_bytes(options, dtype_bytes))
    return max(rows - rows % ROW_MULTIPLE or rows, 1)


def logits_bytes(options: AlgorithmConfig, dtype_bytes: int) -> int:
    """Return the bytes of one logit of a chunk."""
    return max(dtype_bytes, FLOAT if options.logits_dtype == "float32" else 0)


def _logit_bytes_with_gradient(options: AlgorithmConfig, dtype_bytes: int) -> int:
    """Return the bytes of one logit: its gradient overwrites it, and is copied if the weight is narrower."""
    wide = logits_bytes(options, dtype_bytes)
    return wide + dtype_bytes * (wide > dtype_bytes)
