"""Advises on servers, rollout.max_staleness and rollout.over_sampling in asynchronous runs.

A rollout of B groups is taken once B groups are finished and the remaining groups can still be trained on in
time (`rollout.staleness`). So the trainer waits either for finished groups, or for the oldest groups. In the
second case more than B groups are finished. Finished groups are missing if too few groups are open, or if the
servers are full. `engine/busy_in_training` detects idle servers, but not full ones: a single response keeps it
at 1.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

WINDOW = 10  # rollouts averaged, and minimum rollouts between two pieces of advice
MUCH_WAITING = 0.1  # share of a rollout's time
OFTEN_IDLE, ALWAYS = 0.75, 0.9  # maximum and minimum share of training with requests in flight
HELD_BACK, QUEUED = 1.1, 1.5  # minimum ratios of finished groups to groups taken
LONGEST = "theory/longest_response"
_STEP = 0.25  # step of the advised over_sampling

Row = Mapping[str, float]
Lever = Literal["max_staleness", "over_sampling", "more servers", "fewer servers", "less over_sampling"]


@dataclass(frozen=True)
class Limits:
    """Settings that limit sampling ahead of the trainer.

    Attributes:
        prompts_per_rollout: B, groups that a rollout trains on.
        max_staleness: S, in versions, above 0.
        over_sampling: Maximum open groups for each group that a rollout trains on, from 1 to S + 1.
        max_response_tokens: Maximum tokens of a response.
    """

    prompts_per_rollout: int
    max_staleness: int
    over_sampling: float
    max_response_tokens: int


@dataclass(frozen=True)
class Means:
    """Means over rollouts that were sampled while training ran.

    Attributes:
        rollout_s: T, seconds of a rollout, all phases.
        wait_s: Seconds until the rollout could be taken.
        push_s: Seconds of the push, hold included.
        busy: Share of the time between the two with requests in flight.
        requests: Mean number of requests in flight over that time.
        whole: Finished groups when the rollout was taken, for each group taken.
        tokens: Tokens sampled for the rollout.
        longest: Tokens of the longest response in any of the rollouts.
    """

    rollout_s: float
    wait_s: float
    push_s: float
    busy: float
    requests: float
    whole: float
    tokens: float
    longest: float

    @property
    def training_s(self) -> float:
        """Seconds between taking a rollout and the push."""
        return max(self.rollout_s - self.wait_s - self.push_s, 0.0)

    @property
    def token_s(self) -> float:
        """tau: seconds per token of a response, by Little's law. Approximate, because requests vary."""
        return self.requests * self.rollout_s / max(self.tokens, 1.0)

    @property
    def hiding_staleness(self) -> int:
        """Smallest S at which a rollout does not wait for the longest response: S T >= L_max tau."""
        return math.ceil(self.longest * self.token_s / self.rollout_s - 1e-9)


@dataclass(frozen=True)
class Advice:
    """What to change first, and why."""

    lever: Lever
    text: str


def means_of(rows: Sequence[Row], limits: Limits, longest: float | None = None) -> Means | None:
    """Return the means of rollouts' rows, or `None` if there is no row or a row lacks a metric.

    Args:
        rows: Rows of rollouts.
        limits: The run's settings.
        longest: Tokens of the longest response. `None` means the maximum response length.
    """
    names = (
        *("time/total_s", "time/rollout_s", "time/sync_s", "engine/busy_in_training"),
        *("engine/requests_in_training", "rollout/whole_groups", "rollout/num_response_tokens"),
    )
    if not rows or not all(math.isfinite(row.get(name, math.nan)) for row in rows for name in names):
        return None
    total, wait, push, busy, requests, whole, tokens = (fmean(row[name] for row in rows) for name in names)
    if total <= 0:
        return None
    allowed = limits.max_response_tokens
    longest = allowed if longest is None else min(longest, allowed)
    return Means(total, wait, push, busy, requests, whole / limits.prompts_per_rollout, tokens, longest)


def advice(means: Means, limits: Limits) -> Advice | None:
    """Return the first change to make, or `None` if neither trainer nor servers wait much."""
    if means.wait_s > MUCH_WAITING * means.rollout_s:
        return _of_waiting(means, limits)
    if means.busy <= OFTEN_IDLE:
        needed = (means.wait_s + means.busy * means.training_s) / max(means.rollout_s - means.push_s, 1e-9)
        return Advice(
            "fewer servers",
            f"servers had no request for {1 - means.busy:.0%} of training and the trainer hardly waited: about "
            f"{needed:.0%} of the servers would suffice. Give the other GPUs to training, or use fewer.",
        )
    if means.whole >= QUEUED and (lower := _lower(means, limits)) < limits.over_sampling:
        return Advice(
            "less over_sampling",
            f"the finished groups would fill {means.whole:.2g} rollouts, and the trainer hardly waited: groups "
            "sampled ahead only grow stale. Lower rollout.over_sampling from "
            f"{limits.over_sampling:g} to {lower:g}, or use fewer servers.",
        )
    return None


def _of_waiting(means: Means, limits: Limits) -> Advice:
    """Return advice for a waiting trainer: it lacks the oldest groups, open groups, or servers."""
    waited = f"the trainer waited for rollouts {means.wait_s / means.rollout_s:.0%} of the time"
    bound, most = limits.max_staleness, limits.max_staleness + 1
    if means.whole >= HELD_BACK:
        raised = max(most, means.hiding_staleness)
        return Advice(
            "max_staleness",
            f"{waited}, although the finished groups would fill {means.whole:.2g} rollouts: the oldest groups "
            "were still being sampled and had reached the staleness limit. Raise rollout.max_staleness from "
            f"{bound} to {raised} (responses of {means.longest:.0f} tokens take about "
            f"{means.longest * means.token_s:.3g} s, a rollout {means.rollout_s:.3g} s).",
        )
    if limits.over_sampling < most:
        higher = min(limits.over_sampling + 1, most)
        are_full = " If servers report queues (#queue-req), they are full: add servers."
        full = "" if means.busy < ALWAYS else are_full
        return Advice(
            "over_sampling",
            f"{waited}, servers had requests for {means.busy:.0%} of training, and no more groups may be open: "
            f"raise rollout.over_sampling from {limits.over_sampling:g} to {higher:g}.{full}",
        )
    if means.busy < ALWAYS:
        return Advice(
            "max_staleness",
            f"{waited}, while servers had no request for {1 - means.busy:.0%} of training, because no more "
            f"groups may be open: raise rollout.max_staleness from {bound} to {most}, and "
            f"rollout.over_sampling to {most + 1}.",
        )
    times = (means.rollout_s - means.push_s) / max(means.training_s, 1e-9)
    return Advice(
        "more servers",
        f"{waited}, and servers had requests for {means.busy:.0%} of training with the maximum of open groups "
        f"for rollout.max_staleness = {bound}: generation is slower than training. About {times:.2g} times "
        "as many servers would keep up.",
    )


def _lower(means: Means, limits: Limits) -> float:
    """Return over_sampling reduced by the unused finished groups, in steps of `_STEP`, above 1."""
    spare = math.ceil((limits.over_sampling - means.whole + 1) / _STEP - 1e-9) * _STEP
    return max(spare, 1 + _STEP)


class AdviceWatch:
    """Gives advice about a run at most once in WINDOW rollouts, and never the same advice twice in a row."""

    def __init__(self, limits: Limits) -> None:
        """Start without rollouts. The first advice follows the first WINDOW rollouts."""
        self._limits = limits
        self._rows: deque[Row] = deque(maxlen=WINDOW)
        self._longest: deque[float] = deque(maxlen=WINDOW)
        self._longest_of_steps = 0.0
        self._num_silent, self._last = 0, ""

    def add_step(self, values: Row) -> None:
        """Add a gradient step of the current rollout."""
        self._longest_of_steps = max(self._longest_of_steps, values.get(LONGEST, 0.0))

    def check(self, row: Row) -> str | None:
        """Add a rollout's row. Return advice, or `None` if there is none or it is too early."""
        self._rows.append(row)
        self._longest.append(self._longest_of_steps)
        self._longest_of_steps = 0.0
        self._num_silent += 1
        if self._num_silent < WINDOW:
            return None
        self._num_silent = 0
        means = means_of(self._rows, self._limits, max(self._longest) or None)
        found = None if means is None else advice(means, self._limits)
        lever, before = "" if found is None else found.lever, self._last
        self._last = lever
        return None if found is None or lever == before else found.text
