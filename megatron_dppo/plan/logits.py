"""Bytes of logits and of what the loss makes of them, on a rank of the last pipeline stage.

The reference loss holds, at its highest point, float32 logits, their log-softmax, its exponential and the
product of the two (for the entropy); a temperature other than 1 adds the scaled logits. The fused loss writes
the gradient over the logits. The chunked one also makes the logits, some tokens at a time, and keeps gradients
instead.
"""

from megatron_dppo.actor.layout import Layout
from megatron_dppo.plan.model import ModelShape, padded_vocab
from megatron_dppo.plan.options import Options

FLOAT = 4
REFERENCE_COPIES = 4  # float32 [T, V / tensor]
REFERENCE_SAVED = 2  # of those, what autograd keeps: log-softmax and its exponential
STATISTICS_BYTES = 64  # of one token in the fused kernels: partial sums, log-probs, entropy, ratio and the like


def loss_bytes(
    shape: ModelShape,
    layout: Layout,
    options: Options,
    num_tokens: int,
    dtype_bytes: int,
    has_temperature: bool,
) -> int:
    """At the highest point of the loss.

    Args:
        shape: The model's.
        layout: Its tensor size splits the vocabulary.
        options: Which loss.
        num_tokens: Of one micro-batch, after context parallelism.
        dtype_bytes: Of an activation.
        has_temperature: Logits are divided by a temperature other than 1.
    """
    columns = padded_vocab(shape, layout) // layout.tensor
    if options.loss == "reference":
        return num_tokens * columns * FLOAT * (REFERENCE_COPIES + has_temperature)
    if options.loss == "fused":
        return num_tokens * (columns * dtype_bytes + STATISTICS_BYTES)
    chunk = min(options.chunk_tokens, num_tokens) * columns * dtype_bytes
    hidden = shape.sizes.hidden_size
    gradients = num_tokens * hidden * dtype_bytes + columns * hidden * FLOAT
    return chunk + gradients + num_tokens * STATISTICS_BYTES
