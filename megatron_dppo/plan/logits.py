"""Bytes of logits and of what the loss makes of them, on a rank of the last pipeline stage.

These are a GPU's, whose kernels work in place. From hidden states, logits exist some tokens at a time, and the
gradients by hidden states and weight are made with them; they stay until the loss of the next micro-batch
takes their place. From logits, those of all tokens exist; their gradient is written over them and copied once
on its way to the output layer. Every token is taken to learn: the others have no logits in the first form.
"""

from dataclasses import dataclass

from megatron_dppo.actor.layout import Layout
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.plan.model import ModelShape, padded_vocab

FLOAT = 4
STATISTICS = 4  # float32 of one token on each shard, before those of its top-K
ROWS = 11  # float32 of one token that the loss keeps: log-prob, entropy, ratio and the like
ROW_MULTIPLE = 128  # of tokens in a chunk, where it has as many
CHUNKS_ALIVE = 2  # the logits of one chunk are made while those of the chunk before it still stand
CHUNK_INPUTS = 2  # hidden states of a chunk's tokens beside them: what the product takes, what it gives


@dataclass(frozen=True)
class LossTokens:
    """The tokens of one gradient step as the loss sees them on one rank."""

    num_tokens: int  # of one micro-batch, after context parallelism
    num_microbatches: int
    dtype_bytes: int  # of an activation
    topk_columns: int


@dataclass(frozen=True)
class LossMemory:
    """Bytes of the loss on one rank."""

    peak: int  # at its highest point
    kept: int  # from there on, all through backward


def loss_memory(shape: ModelShape, layout: Layout, options: AlgorithmConfig, tokens: LossTokens) -> LossMemory:
    """What the loss holds of a micro-batch.

    Args:
        shape: The model's.
        layout: Its tensor size splits the vocabulary.
        options: How the loss is computed.
        tokens: What it is computed of.
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
        beside = max(tokens.num_tokens * statistics, logits, of_layer)
        return LossMemory(logits + rows + beside, kept=0)
    chunk = chunk_tokens(options, columns, tokens.dtype_bytes)
    kept = states + columns * hidden * FLOAT + rows
    before = kept * (tokens.num_microbatches > 1)  # of the micro-batch before
    in_forward = _chunks(options, tokens, columns, chunk) + gathered + before
    in_forward += min(chunk, tokens.num_tokens) * (CHUNK_INPUTS * hidden * tokens.dtype_bytes + statistics)
    scaled = states + weight  # at the start of backward: scaled gradient, and autograd's own for the weight
    return LossMemory(kept + max(in_forward, scaled), kept)


def chunk_tokens(options: AlgorithmConfig, columns: int, dtype_bytes: int) -> int:
    """Tokens whose logits are made at once."""
    rows = options.logits_chunk_bytes // (columns * logits_bytes(options, dtype_bytes))
    return max(rows - rows % ROW_MULTIPLE or rows, 1)


def logits_bytes(options: AlgorithmConfig, dtype_bytes: int) -> int:
    """Of one logit of a chunk."""
    return max(dtype_bytes, FLOAT if options.logits_dtype == "float32" else 0)


def _chunks(options: AlgorithmConfig, tokens: LossTokens, columns: int, chunk: int) -> int:
    """Logits that exist at once, and where they are wider than the weight their gradient in its type."""
    wide = logits_bytes(options, tokens.dtype_bytes)
    gradient = tokens.dtype_bytes * (wide > tokens.dtype_bytes)
    if chunk >= tokens.num_tokens:
        return tokens.num_tokens * columns * (wide + gradient)
    return chunk * columns * (CHUNKS_ALIVE * wide + gradient)
