"""Raises alarms about a run from its rollout rows.

"Usual" is the median of the last WINDOW rollouts. A rule that lacks a metric, or enough rollouts, is silent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from types import MappingProxyType

from megatron_dppo.algorithms.advantages import SUM_TO_ZERO, TOLERANCE

WINDOW = 10  # rollouts before the one that is checked
ENOUGH = 5  # minimum rollouts for a usual value; rollouts in a mean reward
LENGTH_FACTOR = 2.0  # alarm if longer or shorter than usual by this factor
TV_FACTOR, TV_FLOOR = 3.0, 0.01  # alarm if above usual by this factor and above the floor
IN_A_ROW = 3  # rollouts with a larger tail: a single one depends on its two or three largest tokens
AGREEMENT_DROP = 0.05  # alarm if below usual by this share of experts
LOST_OF_GAIN, STANDARD_ERRORS = 0.5, 3.0  # fall of the mean reward: share of the gain, and standard errors
AGE = "rollout/staleness_max"  # of a rollout's oldest token, in versions
SHOWN = 3  # maximum names of metrics in a message
NOISE_LIMIT = 0.01
"""Share of the tokens with A != 0 that may be masked before any update, while pi and mu have the same weights.

Section 5.3 of the paper (arXiv 2602.04879) finds that half this share of updates is bad. Noise points in the
bad direction about half of the time, so with 1 % masked the threshold is near the noise's 98th percentile.
"""

Row = Mapping[str, float]


def alarms(history: Sequence[Row], row: Row, steps: Sequence[Row] = ()) -> dict[str, str]:
    """Return the message of each alarm that a rollout raises, by the alarm's name.

    Args:
        history: Metrics of all earlier rollouts, in order.
        row: Metrics of this rollout.
        steps: Metrics of the rollout's gradient steps.
    """
    found = {name: rule(history, row) for name, rule in RULES.items()}
    found["not_finite"] = _not_finite([row, *steps])
    return {name: text for name, text in found.items() if text is not None}


class AlarmWatch:
    """Raises alarms about each finished rollout, by comparison with the rows of earlier ones."""

    def __init__(
        self, history: Sequence[Row] = (), last_steps: Sequence[Row] = (), *, is_raised: bool = True
    ) -> None:
        """Continue after the rollouts of `history`.

        Args:
            history: Metrics of all rollouts so far, in order.
            last_steps: Metrics of the last rollout's gradient steps.
            is_raised: Whether the last rollout's alarms were raised already, and are not raised again.
        """
        self.rows: list[Row] = [*map(_of_rules, history[: -WINDOW - 1]), *history[-WINDOW - 1 :]]
        self._steps: list[Row] = []
        is_known = bool(self.rows) and is_raised
        found = alarms(self.rows[:-1], self.rows[-1], last_steps) if is_known else {}
        self._last: frozenset[str] = frozenset(found)

    def add_step(self, values: Row) -> None:
        """Add a gradient step of the current rollout."""
        self._steps.append(values)

    def check(self, row: Row) -> dict[str, str]:
        """Return the alarms of a rollout that the previous rollout did not raise."""
        found = alarms(self.rows, row, self._steps)
        new = {name: text for name, text in found.items() if name not in self._last}
        self.rows.append(row)
        if len(self.rows) > WINDOW + 1:
            self.rows[-WINDOW - 2] = _of_rules(self.rows[-WINDOW - 2])
        self._steps, self._last = [], frozenset(found)
        return new

    def good_until(self, found: Mapping[str, str]) -> int:
        """Return the number of rollouts finished before the last rollout's trouble began.

        A collapse began after the rollouts with the best mean reward. A larger tail began in the first of the
        rollouts that have it. Every other alarm began in the rollout itself.
        """
        if "reward_collapse" not in found:
            is_old = [_age(row) == _age(self.rows[-1]) for row in self.rows]
            of_its_age = [number for number, is_one in enumerate(is_old) if is_one]
            return of_its_age[-IN_A_ROW] if "tv_tail" in found else len(self.rows) - 1
        means = _running_means([_value(row, "reward/mean") for row in self.rows])
        return max(means, key=means.__getitem__)


def write_alarms(folder: Path, rollout: int, found: Mapping[str, str], rows: Sequence[Row]) -> Path:
    """Write `alarm_rollout_<n>.json` with the alarms and the last rows, including the rollout's row."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"alarm_rollout_{rollout:06d}.json"
    kept = [{name: _jsonable(value) for name, value in row.items()} for row in rows[-WINDOW - 1 :]]
    file.write_text(json.dumps({"rollout": rollout, "alarms": dict(found), "rows": kept}, indent=1) + "\n")
    return file


def reward_collapse(history: Sequence[Row], row: Row) -> str | None:
    """Find a fall of the mean reward over ENOUGH rollouts, by more than half the gain and beyond chance."""
    rewards = [value for value in (_value(r, "reward/mean") for r in [*history, row]) if value is not None]
    if len(rewards) < 2 * ENOUGH:
        return None
    means = list(_running_means(rewards).values())
    best, lost = max(means), max(means) - means[-1]
    noise = pstdev([after - before for before, after in pairwise(rewards)]) / math.sqrt(2)
    chance = STANDARD_ERRORS * noise * math.sqrt(2 / ENOUGH)
    is_rounding = math.isclose(best, means[-1], rel_tol=TOLERANCE, abs_tol=SUM_TO_ZERO)
    if is_rounding or lost <= max(LOST_OF_GAIN * (best - means[0]), chance):
        return None
    return f"reward/mean: found {means[-1]:.3g} over {ENOUGH} rollouts; it was {best:.3g} at its best"


def length_jump(history: Sequence[Row], row: Row) -> str | None:
    """Find responses that became LENGTH_FACTOR times longer or shorter."""
    name = "rollout/response_length_mean"
    value, usual = _value(row, name), _usual(history, name)
    if value is None or usual is None or usual / LENGTH_FACTOR <= value <= usual * LENGTH_FACTOR:
        return None
    return f"{name}: found {value:.1f}; usual was {usual:.1f}"


def tv_tail(history: Sequence[Row], row: Row) -> str | None:
    """Find a larger tail of |pi - mu| before any update, IN_A_ROW times: the engines drift apart."""
    name = "mismatch/tv_p999"
    rows = [*_as_old(history, row), row]
    usual = _usual(rows[:-IN_A_ROW], name)
    values = [_value(each, name) for each in rows[-IN_A_ROW:]]
    if usual is None or any(v is None or v <= max(TV_FACTOR * usual, TV_FLOOR) for v in values):
        return None
    shown = ", ".join(f"{value:.3g}" for value in values)
    return f"{name}: found {shown} in {IN_A_ROW} rollouts in a row; usual was {usual:.3g}"


def agreement_drop(history: Sequence[Row], row: Row) -> str | None:
    """Find a fall of the agreement between the trainer's routers and the rollout's."""
    name = "routing/agreement_mean"
    value, usual = _value(row, name), _usual(_as_old(history, row), name)
    if value is None or usual is None or value >= usual - AGREEMENT_DROP:
        return None
    return f"{name}: found {value:.3f}; usual was {usual:.3f}"


READ = ("reward/mean", "mismatch/tv_p999", "routing/agreement_mean", AGE)
"""Metrics that the rules read of rollouts before the last WINDOW."""
RULES: Mapping[str, Callable[[Sequence[Row], Row], str | None]] = MappingProxyType(
    {
        "reward_collapse": reward_collapse,
        "length_jump": length_jump,
        "tv_tail": tv_tail,
        "agreement_drop": agreement_drop,
    }
)


def noise_warning(rollouts: Sequence[Row]) -> str | None:
    """Return a warning if the noise of the last ENOUGH rollouts is above NOISE_LIMIT, else `None`.

    Missing rollouts count as noise-free: one noisy rollout is chance, unless it is very noisy.

    Args:
        rollouts: Metrics of the rollouts so far, in order. The message shows the distances of the last one.
    """
    values = [_value(row, "trust_region/noise_masked_fraction") or 0.0 for row in rollouts[-ENOUGH:]]
    masked = sum(values) / ENOUGH
    if not masked > NOISE_LIMIT:
        return None
    masked, of_rollout = masked * ENOUGH / len(values), rollouts[-1]
    names = {"mean": "abs_prob_diff_mean", "99.9th percentile": "tv_p999"}
    area = "mismatch_age_0" if any(name.startswith("mismatch_age_0/") for name in of_rollout) else "mismatch"
    known = [
        f"{title} {of_rollout[f'{area}/{name}']:.2g}"
        for title, name in names.items()
        if f"{area}/{name}" in of_rollout
    ]
    return (
        f"the trust region sits inside the engines' noise: found {masked:.1%} of tokens masked before any "
        f"update, mean of {len(values)} rollouts (|pi - mu|: {', '.join(known)}); expected at most "
        f"{NOISE_LIMIT:.0%}. Loosen its threshold (algorithm.delta, eps_low and eps_high), or reduce the "
        "noise: rollout.routing_replay, algorithm.logits_dtype, weights of higher precision."
    )


class NoiseWatch:
    """Warns once in a run that the trust region masks the engines' noise."""

    def __init__(self, *, is_raised: bool = False) -> None:
        """Start without rollouts. With `is_raised` it never warns."""
        self._rollouts: list[Row] = []
        self._is_raised = is_raised

    def check(self, of_rollout: Row) -> str | None:
        """Add the metrics before a rollout's first update. Return the warning if it is due."""
        if not of_rollout or self._is_raised:
            return None
        self._rollouts = [*self._rollouts[1 - ENOUGH :], of_rollout]
        warning = noise_warning(self._rollouts)
        self._is_raised = warning is not None
        return warning

    def restarted(self) -> NoiseWatch:
        """Return a watch without rollouts. It warns only if this watch has not warned."""
        return NoiseWatch(is_raised=self._is_raised)


def _not_finite(rows: Sequence[Row]) -> str | None:
    names = sorted({name for row in rows for name, value in row.items() if not math.isfinite(value)})
    if not names:
        return None
    return (
        f"{', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}: found values that are not finite"
    )


def _running_means(rewards: Sequence[float | None]) -> dict[int, float]:
    """Return means of ENOUGH successive finite rewards, keyed by the number of rollouts up to the last one."""
    known = [(number, value) for number, value in enumerate(rewards, start=1) if value is not None]
    windows = (known[i : i + ENOUGH] for i in range(len(known) - ENOUGH + 1))
    return {window[-1][0]: fmean(value for _, value in window) for window in windows}


def _of_rules(row: Row) -> Row:
    """Return the metrics of an old row that the rules read: all of them would grow by 10 kB per rollout."""
    return {name: row[name] for name in READ if name in row}


def _value(row: Row, name: str) -> float | None:
    """Return a metric of the row, or `None` if it is absent or not finite."""
    value = row.get(name, math.nan)
    return value if math.isfinite(value) else None


def _usual(history: Sequence[Row], name: str) -> float | None:
    values = [value for value in (_value(row, name) for row in history[-WINDOW:]) if value is not None]
    return median(values) if len(values) >= ENOUGH else None


def _as_old(history: Sequence[Row], row: Row) -> list[Row]:
    """Return the rollouts with the same token age as this one. Age also increases the mismatch."""
    return [each for each in history if _age(each) == _age(row)]


def _age(row: Row) -> float:
    """Return the age of a rollout's oldest token, in versions."""
    return row.get(AGE, 0.0)


def _jsonable(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(value)
