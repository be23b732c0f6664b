"""Groups that one rank has open, the places that they come from, and what happened to them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_dppo.engines.base import Completion
from megatron_dppo.rollout.groups import PromptGroup
from megatron_dppo.rollout.scoring import Fault
from megatron_dppo.rollout.staleness import OpenGroup
from megatron_dppo.types import Sample


class Places:
    """Places in the stream of prompts that fall to one rank: first those given again, then every size-th."""

    def __init__(self, next_place: int, again: Sequence[int], share: tuple[int, int]) -> None:
        """Begin where a cursor stands.

        Args:
            next_place: The first that was never given.
            again: Those to give again, of all ranks.
            share: (rank, size) of the job.
        """
        rank, size = share
        self.again = deque(again[rank::size])
        self.next = next_place + (rank - next_place) % size
        self.rank, self._size = rank, size

    def take(self) -> int:
        """Return the next place."""
        if self.again:
            return self.again.popleft()
        self.next += self._size
        return self.next - self._size


@dataclass(frozen=True)
class Produced:
    """What happened on one rank since a rollout was taken."""

    num_too_long: int = 0
    replaced: tuple[PromptGroup, ...] = ()  # whose rewards were all equal
    num_interrupted: int = 0  # responses that a push came upon in the middle
    num_prefilled_again: int = 0  # tokens of their requests that servers computed once more
    elapsed_s: float = 0.0  # seconds since the rollout was taken
    busy_s: float = 0.0  # seconds of them with requests on their way
    request_s: float = 0.0  # summed over requests on their way


@dataclass(eq=False)
class OpenedGroup:
    """A group that is open: begun, and not trained on."""

    place: int
    born: int | None = None
    has_tokens: bool = False  # sampled for it; until then, and until it is whole, it may be born again
    group: PromptGroup | None = None  # none until its prompt is there
    completions: list[Completion | None] = field(default_factory=list[Completion | None])
    samples: list[Sample | Fault | None] = field(default_factory=list[Sample | Fault | None])

    @property
    def begun(self) -> PromptGroup:
        """The group, whose prompt is there."""
        assert self.group is not None, "its responses are asked for once its prompt is there"
        return self.group

    @property
    def is_whole(self) -> bool:
        """Whether all of its responses were sampled and scored."""
        return self.group is not None and None not in self.samples

    def whole(self) -> PromptGroup:
        """Return the group with its responses, scored."""
        scored = tuple(sample for sample in self.samples if sample is not None)
        return replace(self.begun, completions=tuple(self.completions), scored=scored)


@dataclass(frozen=True)
class ProducerState:
    """What is open on one rank, and the places that it goes on from."""

    groups: tuple[OpenGroup, ...]
    next_place: int  # the next of this rank that was never given
    again: tuple[int, ...]  # to be given again, and not begun
