"""Assigns layers to pipeline stages, and counts the micro-batches that a stage holds at once."""

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import Chunk


def chunks_of(stage: int, layout: Layout, num_layers: int) -> tuple[Chunk, ...]:
    """Return the model chunks of a stage, in order, of equally many layers; one without interleaving.

    Args:
        stage: 0-based.
        layout: The layout's pipeline and virtual_pipeline are read; their product divides the layers.
        num_layers: Of the model.
    """
    of_chunk, rest = divmod(num_layers, layout.pipeline * layout.virtual_pipeline)
    assert not rest, "layouts that do not divide the layers are refused before they are planned"
    starts = [(index * layout.pipeline + stage) * of_chunk for index in range(layout.virtual_pipeline)]
    return tuple(
        Chunk(range(start, start + of_chunk), start == 0, start + of_chunk == num_layers) for start in starts
    )


def chunks_in_flight(stage: int, layout: Layout, num_microbatches: int) -> int:
    """Return the forward passes of which a stage holds activations: Megatron's warm-up, and the current one.

    Args:
        stage: 0-based.
        layout: The layout's pipeline and virtual_pipeline are read.
        num_microbatches: Of one gradient step.
    """
    ahead = layout.pipeline - stage - 1
    virtual = layout.virtual_pipeline
    warm_up = ahead if virtual == 1 else 2 * ahead + (virtual - 1) * layout.pipeline
    return min(warm_up + 1, num_microbatches * virtual)
