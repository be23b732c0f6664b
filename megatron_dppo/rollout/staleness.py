"""The hard bound of staleness: how many groups may be begun, and which of them a rollout trains on.

A group is *open* from its begin until it is trained on, *born* with the version of the weights that its first
token may be sampled by, and *due* at version born + S: trained on later, it would be older than S =
`rollout.max_staleness` versions. Versions rise by one with each push; a rollout of B groups is trained on per
version. Two rules keep the bound without dropping anything:

- Admission: at most B (S + 1) groups are open while version V is what trains next, and B S while a rollout is
  trained on, since what begins then meets V + 1 at best.
- Choice at version V: the B oldest whole groups, if for each version d the groups left that are due by d number
  at most B (d - V); else it is waited for.

By induction, after each choice the groups due by d number at most B (d - V) for all d: an admission adds
groups that are due at V + S, and the total stays within its capacity. Once all open groups are whole the choice
exists, so that it is never waited for in vain. Taking the oldest first is optimal (earliest deadline first), so
that it is waited for only where the bound demands it, and long responses are not thrown away.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class OpenGroup:
    """What ranks tell each other of a group that is open."""

    rank: int
    place: int  # of its prompt in the stream; unique
    born: int | None  # version of the weights; none while it is open and nothing was sampled
    is_whole: bool  # whether all of its responses ended and were scored, with or without a token

    def __post_init__(self) -> None:
        assert self.born is not None or not self.is_whole, "a group that is whole was born"


@dataclass(frozen=True)
class StalenessBound:
    """The rules for rollouts of `prompts_per_rollout` groups; pure, and the same on every rank.

    Attributes:
        prompts_per_rollout: B, groups that a rollout trains on, over all ranks.
        max_staleness: S, versions that a trained token's weights may be behind.
        over_sampling: Groups that may be open for each one that a rollout trains on, from 1 to S + 1.
    """

    prompts_per_rollout: int
    max_staleness: int
    over_sampling: float = 1.0

    def capacity(self, num_left: int, *, is_training: bool) -> int:
        """Return the number of groups that may be open, over all ranks.

        Args:
            num_left: Rollouts that are still to be taken, which need no more groups than they have.
            is_training: Whether a rollout is trained on until the next push.
        """
        num_rollouts = min(self.max_staleness + (0 if is_training else 1), num_left)
        num_wanted = math.ceil(self.over_sampling * self.prompts_per_rollout)
        return min(num_wanted, self.prompts_per_rollout * num_rollouts)

    def limits(self, num_open: Sequence[int], num_left: int, *, is_training: bool) -> list[int]:
        """Return the number of groups that each rank may have open: new ones go where the fewest are.

        A fixed share of the capacity for each rank would stand still: the choice takes unevenly, ranks would
        refill, and more groups would be due than rollouts can train on.

        Args:
            num_open: Groups that each rank has open.
            num_left: See `capacity`.
            is_training: See `capacity`.
        """
        limits = list(num_open)
        for _ in range(self.capacity(num_left, is_training=is_training) - sum(num_open)):
            limits[limits.index(min(limits))] += 1
        return limits

    def choose(self, groups: Sequence[OpenGroup], version: int) -> list[OpenGroup] | None:
        """Return the groups that weights `version` train on, oldest first; none while they must be waited for.

        Args:
            groups: All that are open, of all ranks.
            version: Of the weights that train next.
        """
        whole = [(group.born, group.place, group) for group in groups if group.is_whole]
        chosen = [group for _, _, group in sorted(whole)[: self.prompts_per_rollout]]
        if len(chosen) < self.prompts_per_rollout:
            return None
        taken = {group.place for group in chosen}
        left = Counter(group.born for group in groups if group.born is not None and group.place not in taken)
        num_due = 0
        for born in sorted(left):
            num_due += left[born]
            if num_due > self.prompts_per_rollout * (born + self.max_staleness - version):
                return None
        return chosen
