"""Advises on servers, rollout.max_staleness and rollout.over_sampling where sampling goes on beside training.

A rollout of B groups is taken once B are whole and those left can still be trained on in time
(`rollout.staleness`). So a trainer that waits lacks either whole groups, or the oldest ones: more than B are
whole then. Whole groups are lacking where too few are open, or where servers have no room for more.
`engine/busy_in_training` tells idle servers, not full ones: a single response keeps it at 1.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

WINDOW = 10  # rollouts that the means are of; advice is given at most once in as many
MUCH_WAITING = 0.1  # of a rollout's time
OFTEN_IDLE, ALWAYS = 0.75, 0.9  # up to, and from: shares of training with requests on their way
HELD_BACK, QUEUED = 1.1, 1.5  # from: whole groups for each one taken
LONGEST = "theory/longest_response"
_STEP = 0.25  # over_sampling is advised in such steps

Row = Mapping[str, float]
Lever = Literal["max_staleness", "over_sampling", "more servers", "fewer servers", "less over_sampling"]


@dataclass(frozen=True)
class Limits:
    """Settings that bound what is sampled ahead.

    Attributes:
        prompts_per_rollout: B, groups that a rollout trains on.
        max_staleness: S, in versions; above 0.
        over_sampling: Groups that may be open for each one that a rollout trains on, from 1 to S + 1.
        max_response_tokens: Of one response.
    """

    prompts_per_rollout: int
    max_staleness: int
    over_sampling: float
    max_response_tokens: int


@dataclass(frozen=True)
class Means:
    """Means over some rollouts that were sampled beside training.

    Attributes:
        rollout_s: T, seconds of a rollout, all phases.
        wait_s: Of them, until it could be taken.
        push_s: Of the push, hold included.
        busy: Share of the time between with requests on their way.
        requests: Their mean number over that time.
        whole: Groups that were whole when it was taken, for each one taken.
        tokens: Sampled for it.
        longest: Tokens of the longest response of all.
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
        """tau: seconds that a response takes per token, by Little's law; about, as requests vary."""
        return self.requests * self.rollout_s / max(self.tokens, 1.0)

    @property
    def hiding_staleness(self) -> int:
        """The smallest S with which a rollout need not wait for the longest response: S T >= L_max tau."""
        return math.ceil(self.longest * self.token_s / self.rollout_s - 1e-9)


@dataclass(frozen=True)
class Advice:
    """What to change first, and why."""

    lever: Lever
    text: str


def means_of(rows: Sequence[Row], limits: Limits, longest: float | None = None) -> Means | None:
    """Return the means of rollouts' rows; none where one lacks a metric, or there is none.

    Args:
        rows: Of rollouts.
        limits: The run's settings.
        longest: Tokens of their longest response, where that is known; else it is the longest allowed.
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
    """Return what to change first; none where neither trainer nor servers wait much for the other."""
    if means.wait_s > MUCH_WAITING * means.rollout_s:
        return _of_waiting(means, limits)
    if means.busy <= OFTEN_IDLE:
        needed = (means.wait_s + means.busy * means.training_s) / max(means.rollout_s - means.push_s, 1e-9)
        return Advice(
            "fewer servers",
            f"servers had no request for {1 - means.busy:.0%} of training and the trainer hardly waited: about "
            f"{needed:.0%} of the servers would keep up. Give their GPUs to training, or use fewer.",
        )
    if means.whole >= QUEUED and (lower := _lower(means, limits)) < limits.over_sampling:
        return Advice(
            "less over_sampling",
            f"{means.whole:.2g} times as many groups were whole as a rollout takes, and the trainer hardly "
            "waited: what is ahead only grows older. Lower rollout.over_sampling from "
            f"{limits.over_sampling:g} to {lower:g}, or use fewer servers.",
        )
    return None


def _of_waiting(means: Means, limits: Limits) -> Advice:
    """Return what the trainer waits for: the oldest groups, more that are open, or servers."""
    waited = f"the trainer waited for rollouts {means.wait_s / means.rollout_s:.0%} of the time"
    bound, most = limits.max_staleness, limits.max_staleness + 1
    if means.whole >= HELD_BACK:
        raised = max(most, means.hiding_staleness)
        return Advice(
            "max_staleness",
            f"{waited}, although {means.whole:.2g} times as many groups were whole as one takes: the oldest "
            "were still being sampled and could wait no longer. Raise rollout.max_staleness from "
            f"{bound} to {raised} (responses of {means.longest:.0f} tokens take about "
            f"{means.longest * means.token_s:.3g} s, a rollout {means.rollout_s:.3g} s).",
        )
    if limits.over_sampling < most:
        higher = min(limits.over_sampling + 1, most)
        are_full = " Where servers report queues (#queue-req), they are full: add some."
        full = "" if means.busy < ALWAYS else are_full
        return Advice(
            "over_sampling",
            f"{waited}, servers had requests for {means.busy:.0%} of training, and no more groups may be open: "
            f"raise rollout.over_sampling from {limits.over_sampling:g} to {higher:g}.{full}",
        )
    if means.busy < ALWAYS:
        return Advice(
            "max_staleness",
            f"{waited}, while servers had no request for {1 - means.busy:.0%} of training, since no more "
            f"groups may be open: raise rollout.max_staleness from {bound} to {most}, and "
            f"rollout.over_sampling to {most + 1}.",
        )
    times = (means.rollout_s - means.push_s) / max(means.training_s, 1e-9)
    return Advice(
        "more servers",
        f"{waited}, and servers had requests for {means.busy:.0%} of training with as many groups open as "
        f"rollout.max_staleness = {bound} allows: generation is slower than training. About {times:.2g} times "
        "as many servers would keep up.",
    )


def _lower(means: Means, limits: Limits) -> float:
    """Return over_sampling without the groups that lie whole, in steps of `_STEP`, above 1."""
    spare = math.ceil((limits.over_sampling - means.whole + 1) / _STEP - 1e-9) * _STEP
    return max(spare, 1 + _STEP)


class AdviceWatch:
    """Gives advice about a run at most once in WINDOW rollouts, and not the same twice in a row."""

    def __init__(self, limits: Limits) -> None:
        """Begin without rollouts: the first advice is of the first WINDOW."""
        self._limits = limits
        self._rows: deque[Row] = deque(maxlen=WINDOW)
        self._longest: deque[float] = deque(maxlen=WINDOW)
        self._longest_of_steps = 0.0
        self._num_silent, self._last = 0, ""

    def add_step(self, values: Row) -> None:
        """Add a gradient step of the current rollout."""
        self._longest_of_steps = max(self._longest_of_steps, values.get(LONGEST, 0.0))

    def check(self, row: Row) -> str | None:
        """Return advice after a rollout; none where there is none, or where it is too early for more."""
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
