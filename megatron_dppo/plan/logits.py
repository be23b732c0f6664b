"""Estimates the bytes of logits and of the loss, on a rank of the last pipeline stage.

These are a GPU's, whose kernels work in place. From hidden states, logits exist some tokens at a time, and the
gradients by hidden states and weight are made with them; they go when backward has passed the loss. From
logits, those of all tokens exist, and their gradient is written over them. Every token is taken to learn: the
others have no logits in the first form.
"""

from dataclasses import dataclass

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import ModelShape, padded_vocab
from megatron_dppo.config.schema import AlgorithmConfig

FLOAT = 4
STATISTICS = 4  # float32 of one token on each shard, before those of its top-K
ROWS = 11  # float32 of one token that the loss keeps: log-prob, entropy, ratio and the like
ROW_MULTIPLE = 128  # of tokens in a chunk, where it has as many
CHUNK_INPUTS = 2  # hidden states of a chunk's tokens beside them: what the product takes, what it gives


@dataclass(frozen=True)
class LossTokens:
    """Tokens of one micro-batch in the loss on one rank."""

    num_tokens: int  # after context parallelism
    dtype_bytes: int  # of an activation
    topk_columns: int


def loss_bytes(shape: ModelShape, layout: Layout, options: AlgorithmConfig, tokens: LossTokens) -> int:
    """Return the peak bytes of the loss of a micro-batch; they are freed before backward of the layers.

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
        return logits + rows + max(tokens.num_tokens * statistics, of_layer)
    chunk = min(chunk_tokens(options, columns, tokens.dtype_bytes), tokens.num_tokens)
    of_token = columns * _logit_bytes_with_gradient(options, tokens.dtype_bytes)
    of_token += CHUNK_INPUTS * hidden * tokens.dtype_bytes + statistics
    scaled = states + weight  # at the start of backward: scaled gradient, and autograd's own for the weight
    return states + columns * hidden * FLOAT + rows + max(chunk * of_token + gathered, scaled)


def chunk_tokens(options: AlgorithmConfig, columns: int, dtype_bytes: int) -> int:
    """Return the number of tokens whose logits are made at once."""
    rows = options.logits_chunk_bytes // (columns * logits_bytes(options, dtype_bytes))
    return max(rows - rows % ROW_MULTIPLE or rows, 1)


def logits_bytes(options: AlgorithmConfig, dtype_bytes: int) -> int:
    """Return the bytes of one logit of a chunk."""
    return max(dtype_bytes, FLOAT if options.logits_dtype == "float32" else 0)


def _logit_bytes_with_gradient(options: AlgorithmConfig, dtype_bytes: int) -> int:
    """Return the bytes of one logit: its gradient overwrites it, and is copied where the weight is narrower."""
    wide = logits_bytes(options, dtype_bytes)
    return wide + dtype_bytes * (wide > dtype_bytes)
