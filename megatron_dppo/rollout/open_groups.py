"""Open groups of one rank, the prompt indices that they come from, and counts of what happened to them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_dppo.engines.base import Completion
from megatron_dppo.rollout.groups import PromptGroup
from megatron_dppo.rollout.scoring import Fault
from megatron_dppo.rollout.staleness import OpenGroup
from megatron_dppo.types import Sample


class Places:
    """Prompt indices of one rank: first the prompts that a resumed run repeats, then every size-th prompt."""

    def __init__(self, next_place: int, again: Sequence[int], share: tuple[int, int]) -> None:
        """Start at a cursor.

        Args:
            next_place: Index of the first prompt that was never used.
            again: Indices of the prompts to repeat, for all ranks.
            share: (rank, size) of the job.
        """
        rank, size = share
        self.again = deque(again[rank::size])
        self.next = next_place + (rank - next_place) % size
        self.rank, self._size = rank, size

    def take(self) -> int:
        """Return the next prompt index."""
        if self.again:
            return self.again.popleft()
        self.next += self._size
        return self.next - self._size


@dataclass(frozen=True)
class Produced:
    """Counts and times of one rank's sampling since the last rollout was taken."""

    num_too_long: int = 0
    replaced: tuple[PromptGroup, ...] = ()  # groups with equal rewards
    num_interrupted: int = 0  # responses that a push interrupted
    num_prefilled_again: int = 0  # prompt tokens of their requests that servers computed again
    elapsed_s: float = 0.0  # seconds since the rollout was taken
    busy_s: float = 0.0  # seconds of them with at least one request in flight
    request_s: float = 0.0  # seconds in flight, summed over requests


@dataclass(eq=False)
class OpenedGroup:
    """A group that has begun and was not trained on yet."""

    place: int
    born: int | None = None
    has_tokens: bool = False  # while it has no tokens and is not whole, a push resets `born`
    group: PromptGroup | None = None  # `None` until its prompt is ready
    completions: list[Completion | None] = field(default_factory=list[Completion | None])
    samples: list[Sample | Fault | None] = field(default_factory=list[Sample | Fault | None])

    @property
    def begun(self) -> PromptGroup:
        """Group of requests, once its prompt is ready."""
        assert self.group is not None, "its responses are requested once its prompt is ready"
        return self.group

    @property
    def is_whole(self) -> bool:
        """Whether all of its responses are sampled and scored."""
        return self.group is not None and None not in self.samples

    def whole(self) -> PromptGroup:
        """Return the group with its scored responses."""
        scored = tuple(sample for sample in self.samples if sample is not None)
        return replace(self.begun, completions=tuple(self.completions), scored=scored)


@dataclass(frozen=True)
class ProducerState:
    """Open groups of one rank, and its next prompt indices."""

    groups: tuple[OpenGroup, ...]
    next_place: int  # index of this rank's next prompt that was never used
    again: tuple[int, ...]  # indices of prompts to repeat that have not begun
