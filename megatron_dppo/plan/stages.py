"""Which layers stand on which pipeline stage, and how many micro-batches a stage holds at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.actor.layout import Layout
from megatron_dppo.errors import ConfigError, LayoutError, Problem
from megatron_dppo.plan.model import Chunk

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True)
class Split:
    """`[megatron]`'s wishes for an uneven pipeline."""

    num_first: int | None = None  # layers of the first stage
    num_last: int | None = None  # layers of the last stage
    counts_embedding: bool = False  # the embedding takes the place of one layer of the first stage
    counts_loss: bool = False  # the output layer takes the place of one layer of the last stage

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> "Split":
        """What the pass-through table asks for.

        Raises:
            ConfigError: A number of layers is none.
        """
        expected, action = "a whole number above 0", "Correct or remove it."
        problems = [
            Problem(f"megatron.{key}", repr(megatron[key]), expected, action)
            for key in (FIRST, LAST)
            if megatron.get(key) is not None and (type(megatron[key]) is not int or megatron[key] < 1)
        ]
        if problems:
            raise ConfigError(problems)
        return cls(
            num_first=megatron.get(FIRST),
            num_last=megatron.get(LAST),
            counts_embedding=bool(megatron.get("account_for_embedding_in_pipeline_split")),
            counts_loss=bool(megatron.get("account_for_loss_in_pipeline_split")),
        )


def layers_per_stage(num_layers: int, num_stages: int, split: Split) -> tuple[int, ...]:
    """Transformer layers of each pipeline stage.

    Raises:
        LayoutError: They do not divide.
    """
    if num_stages == 1:
        return (num_layers,)
    if split.num_first is None and split.num_last is None:
        slots = num_layers + split.counts_embedding + split.counts_loss
        if slots % num_stages:
            raise _indivisible(f"{slots} layers (embedding and loss counted where asked)", num_stages)
        counts = [slots // num_stages] * num_stages
        counts[0] -= split.counts_embedding
        counts[-1] -= split.counts_loss
        return tuple(counts)
    fixed = {0: split.num_first, num_stages - 1: split.num_last}
    given = {stage: count for stage, count in fixed.items() if count is not None}
    left, num_left = num_layers - sum(given.values()), num_stages - len(given)
    if (num_left and left % num_left) or left < num_left or (not num_left and left):
        raise _indivisible(f"{left} layers between the given first and last stages", num_left)
    return tuple(given.get(stage, left // max(num_left, 1)) for stage in range(num_stages))


def chunks_of(stage: int, layout: Layout, counts: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The model chunks of a stage, in order; one where the pipeline is not interleaved.

    Args:
        stage: 0-based.
        layout: The layout's pipeline and virtual_pipeline are read.
        counts: From `layers_per_stage`.

    Raises:
        LayoutError: A stage's layers do not divide over its chunks.
    """
    virtual = layout.virtual_pipeline
    if any(count % virtual for count in counts):
        raise _indivisible(f"stages of {', '.join(map(str, counts))} layers", virtual)
    per_round = sum(counts) // virtual
    chunks: list[Chunk] = []
    for index in range(virtual):
        start = index * per_round + sum(counts[:stage]) // virtual
        chunks.append(
            Chunk(
                layers=range(start, start + counts[stage] // virtual),
                is_first=stage == 0 and index == 0,
                is_last=stage == layout.pipeline - 1 and index == virtual - 1,
            )
        )
    return tuple(chunks)


def chunks_in_flight(stage: int, layout: Layout, num_microbatches: int) -> int:
    """Forward passes of a chunk that a stage holds activations of: Megatron's warm-up, and the one at work.

    Args:
        stage: 0-based.
        layout: The layout's pipeline and virtual_pipeline are read.
        num_microbatches: Of one gradient step.
    """
    ahead = layout.pipeline - stage - 1
    virtual = layout.virtual_pipeline
    warm_up = ahead if virtual == 1 else 2 * ahead + (virtual - 1) * layout.pipeline
    return min(warm_up + 1, num_microbatches * virtual)


def _indivisible(what: str, parts: int) -> LayoutError:
    action = f"Choose a pipeline that divides them, or set megatron.{FIRST} and megatron.{LAST}."
    return LayoutError(Problem("parallel.pipeline", what, f"a multiple of {parts}", action))
