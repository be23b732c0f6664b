"""Bounds staleness strictly: how many groups may be open, and which of them a rollout trains on.

A group is *open* from its first request until it is trained on. It is *born* with the version of the weights
that may sample its first token. It is *due* at version born + S, with S = `rollout.max_staleness`: if it were
trained on later, its tokens would be too old. The version rises by one with each push, and each version trains
on one rollout of B groups. Two rules keep the bound without dropping any group if S > 0:

- Admission: at most B (S + 1) groups are open while version V trains next, and at most B S while a rollout is
  trained on, since version V + 1 is the first that can train on a group that begins then.
- Choice at version V: the B oldest whole groups, if for each version d at most B (d - V) of the remaining
  groups are due by d. Otherwise the rollout waits.

Proof by induction: after each choice, at most B (d - V) groups are due by d, for all d. An admission adds
groups that are due at V + S, and the total stays within its capacity. Once all open groups are whole, the
choice exists, so every wait ends. Taking the oldest groups first is optimal (earliest deadline first), so a
rollout waits only if the bound requires it, and no long response is dropped.

With S = 0 no group is open before the push or while a rollout is trained on. A rollout may begin more than B
groups (over-sampling). It takes the first B that are whole, and the others are dropped.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dppo.config.sections import num_over_sampled


@dataclass(frozen=True, order=True)
class OpenGroup:
    """The state of an open group that ranks exchange."""

    rank: int
    place: int  # its prompt's index in the stream; unique
    born: int | None  # weight version; `None` while no token was sampled
    is_whole: bool  # whether all its responses have ended and are scored, even if they have no tokens
    order: int = 0  # place of the first group that it replaces, or its own; sorts groups of one version

    def __post_init__(self) -> None:
        assert self.born is not None or not self.is_whole, "a group that is whole was born"


@dataclass(frozen=True)
class Deal:
    """Which rank takes which prompt: in turn; if epochs repeat their order, the next rank begins each of them.

    Otherwise a rank would see the same prompts in each epoch of a file whose length the ranks divide.
    """

    start: int  # index of the first prompt that was never used
    first: int  # rank that takes it
    size: int  # of the job
    period: int = 0  # prompts of an epoch that repeats the order of the epoch before; 0 if none does

    def rank_of(self, place: int) -> int:
        """Return the rank that takes a prompt, given its index in the stream."""
        epochs = place // self.period - self.start // self.period if self.period else 0
        return (place - self.start + self.first + epochs) % self.size

    def next(self, rank: int, place: int) -> int:
        """Return the first index from `place` on that a rank takes."""
        while self.rank_of(place) != rank:
            place += 1
        return place


@dataclass(frozen=True)
class ProducerState:
    """Open groups of one rank, and its next prompt indices."""

    groups: tuple[OpenGroup, ...]
    next_place: int  # index of this rank's next prompt that was never used
    again: tuple[int, ...]  # indices of prompts to repeat that have not begun
    top: int  # first index after all that this rank has used, or that were used before
    deal: Deal


def upcoming_after(ranks: Sequence[ProducerState]) -> tuple[int, Sequence[int]]:
    """Return `PromptStream.upcoming` after all ranks have dropped their open groups, given their states."""
    top = max(state.top for state in ranks)
    again = {group.place for state in ranks for group in state.groups}
    for rank, state in enumerate(ranks):
        unused = (place for place in range(state.next_place, top) if state.deal.rank_of(place) == rank)
        again.update(state.again, unused)
    return top, sorted(again)


class Places:
    """Prompt indices of one rank: its share of the upcoming ones, prompts to repeat first."""

    def __init__(self, next_place: int, again: Sequence[int], share: tuple[int, int]) -> None:
        """Start at a cursor.

        Args:
            next_place: Index of the first prompt that was never used.
            again: Indices of the prompts to repeat before it, for all ranks.
            share: (rank, size) of the job.
        """
        self.rank, size = share
        self.again = deque(again[self.rank :: size])
        self._deal, self._top = Deal(next_place, len(again) % size, size), next_place
        self.next = self._deal.next(self.rank, next_place)

    def repeated(self, period: int) -> "Places":
        """Return these places, dealt as `Deal` says if epochs of so many prompts repeat."""
        self._deal = replace(self._deal, period=period)
        self.next = self._deal.next(self.rank, self._deal.start)
        return self

    def take(self) -> int:
        """Return the next prompt index."""
        if self.again:
            return self.again.popleft()
        place, self._top = self.next, self.next + 1
        self.next = self._deal.next(self.rank, place + 1)
        return place

    def state(self, groups: Sequence[OpenGroup] = ()) -> ProducerState:
        """Return the state of a rank with these open groups."""
        return ProducerState(tuple(groups), self.next, tuple(self.again), self._top, self._deal)


@dataclass(frozen=True)
class StalenessBound:
    """Rules for rollouts of `prompts_per_rollout` groups: pure functions, the same on every rank.

    Attributes:
        prompts_per_rollout: B, number of groups that a rollout trains on, over all ranks.
        max_staleness: S, largest number of versions between sampling a token and training on it.
        over_sampling: Open groups per group that a rollout trains on: 1 to S + 1, or any from 1 with S = 0.
    """

    prompts_per_rollout: int
    max_staleness: int
    over_sampling: float = 1.0

    @property
    def takes_all(self) -> bool:
        """Whether each rollout takes all open groups, so that it waits until all of them are whole."""
        return not self.max_staleness and self.over_sampling == 1

    def capacity(self, num_left: int, *, is_training: bool) -> int:
        """Return the number of groups that may be open, over all ranks.

        Args:
            num_left: Number of rollouts that the run still needs; no groups are opened beyond them.
            is_training: Whether a rollout is being trained on, until the next push.
        """
        num_wanted = num_over_sampled(self.over_sampling, self.prompts_per_rollout)
        if not self.max_staleness:
            return 0 if is_training or not num_left else num_wanted
        num_rollouts = min(self.max_staleness + (0 if is_training else 1), num_left)
        return min(num_wanted, self.prompts_per_rollout * num_rollouts)

    def limits(self, num_open: Sequence[int], num_left: int, *, is_training: bool) -> list[int]:
        """Return the number of groups that each rank may have open: ranks with the fewest get the new ones.

        With a fixed share of the capacity for each rank the run could stall. The choice takes groups unevenly
        and ranks would refill, so more groups would be due than rollouts can train on.

        Args:
            num_open: Number of open groups of each rank.
            num_left: See `capacity`.
            is_training: See `capacity`.
        """
        limits = list(num_open)
        for _ in range(self.capacity(num_left, is_training=is_training) - sum(num_open)):
            limits[limits.index(min(limits))] += 1
        return limits

    def choose(self, groups: Sequence[OpenGroup], version: int) -> list[OpenGroup] | None:
        """Return the groups that weight version `version` trains on, oldest first, or None to wait.

        Args:
            groups: All open groups of all ranks.
            version: Weight version that trains next.
        """
        whole = [(group.born, group.order, group.place, group) for group in groups if group.is_whole]
        chosen = [group for *_, group in sorted(whole)[: self.prompts_per_rollout]]
        if len(chosen) < self.prompts_per_rollout:
            return None
        if not self.max_staleness:
            return chosen  # the others are dropped
        taken = {group.place for group in chosen}
        left = Counter(group.born for group in groups if group.born is not None and group.place not in taken)
        num_due = 0
        for born in sorted(left):
            num_due += left[born]
            if num_due > self.prompts_per_rollout * (born + self.max_staleness - version):
                return None
        return chosen
