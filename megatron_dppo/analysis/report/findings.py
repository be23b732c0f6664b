"""Writes the report's findings, one sentence for each question: pure functions from runs to sentences.

A sentence reports a measurement and whether it decides the question. Questions that the runs cannot decide are
left out: runs of different data or models are not compared, nor runs of few rollouts. One seed decides nothing
between two runs; MIN_SEEDS or more decide by the interval of the paired differences. Only the
forward of the same tokens with live and with replayed routes decides within a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from megatron_dppo.algorithms.advantages import SUM_TO_ZERO, TOLERANCE
from megatron_dppo.analysis.contrasts import Contrast, contrast, pooled_change
from megatron_dppo.analysis.lines import (
    R3,
    Line,
    changed_keys,
    finite_mean,
    lines_of,
    over_rollouts,
)
from megatron_dppo.analysis.report.diagnostics import (
    Alarm,
    alarms_of,
    anchor_cost,
    describe_unfinished,
    num_roll_backs,
    num_skipped_steps,
    warnings_of,
    why_not_comparable,
)
from megatron_dppo.analysis.report.summary import LAST, format_number, paired_rows
from megatron_dppo.config.resuming import may_change
from megatron_dppo.run_folder.reader import Run

Verdict = Literal["decided", "open", "warning", "note"]

MIN_FORWARDS = 10  # rollouts that forwarded the same tokens twice
MIN_ROLLOUTS = 2 * LAST  # with fewer, the first and the last LAST rollouts overlap
SAME = 0.01  # smaller relative differences count as equal
MOST_COMPARISONS = 3  # settings besides the first; with more, only decided findings are shown
MOST_PLACES = 4  # rollouts named for one alarm
_percent, _count = partial(format_number, style="share"), partial(format_number, style="count")


@dataclass(frozen=True)
class Finding:
    """One sentence, and whether it decides a question."""

    topic: str
    text: str
    verdict: Verdict


@dataclass(frozen=True)
class Measure:
    """A number of a run that two settings are compared by."""

    topic: str
    words: str  # as the sentence begins
    value: Callable[[Run, int], float | None]  # of the run and the number of rollouts that all runs have
    format: Callable[[float], str]


def findings(runs: Sequence[Run], names: Sequence[str]) -> list[Finding]:
    """Return the findings, differences between runs first. Empty if no run has a finished rollout."""
    begun = [(run, name) for run, name in zip(runs, names, strict=True) if run.rollouts]
    if not begun:
        return []
    finished, labels = [run for run, _ in begun], [name for _, name in begun]
    replay = list(_routing_replay(finished, labels))
    answers = list(_comparisons(finished, labels) if len(finished) > 1 else _one_run(finished[0]))
    return [
        *([*replay, *answers] if R3 in changed_keys(finished) else [*answers, *replay]),
        *_warnings(finished, labels),
        *_stability(finished, labels),
        *_speed(finished, labels),
        *(Finding("length of the run", text, "note") for text in describe_unfinished(finished, labels)),
    ]


def incomparable_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings of data and model on which the runs differ, so that rewards mean different things."""
    return [key for key in changed_keys(runs) if key.startswith(("data.", "model.")) and not may_change(key)]


def _routing_replay(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Finding]:
    """Yield what R3 does, or would do, to the KL of the same tokens: of all runs together, else of each."""
    having = [(run, name) for run, name in zip(runs, names, strict=True) if paired_rows(run)]
    if not having:
        return
    together = not incomparable_keys([run for run, _ in having])
    groups = [having] if together else [[one] for one in having]
    for group in groups:
        rows = [row for run, _ in group for row in paired_rows(run)]
        where = f"{len(rows)} forwards" + (f" of {len(group)} runs" if len(group) > 1 else "")
        found = pooled_change(*zip(*rows, strict=True))
        if math.isnan(found.change):
            continue
        of = "" if together else f" in {group[0][1]}"
        change = f"the KL between rollout and trainer on the same tokens{of}"
        amount = f"{abs(found.change):.0%}".replace("%", " %")
        is_replayed = any(run.option(R3) == "replay" for run, _ in group)
        if len(rows) < MIN_FORWARDS:
            word = "lower" if found.change < 0 else "higher"
            verb = "was" if is_replayed else "would be"
            text = f"With R3 {change} {verb} {amount} {word} over {where}: too few to decide."
            yield Finding("mismatch", text, "open")
        elif found.low <= 0 <= found.high or math.isnan(found.low):
            text = f"Whether R3 lowers {change} is not decided: {_signed(found.change)} over {where}"
            yield Finding("mismatch", f"{text}, 95 % interval {_span(found.low, found.high)}.", "open")
        else:
            word = "lower" if found.change < 0 else "raise"
            word = f"would {word}" if not is_replayed else "lowered" if found.change < 0 else "raised"
            ends = sorted(abs(100 * end) for end in (found.low, found.high))
            interval = f"{ends[0]:.0f} to {ends[1]:.0f} %"
            if not is_replayed:
                interval += "; no run replayed" if len(group) > 1 else "; the run did not replay"
            text = f"R3 {word} {change} by {amount} ({where}, 95 % interval {interval})."
            yield Finding("mismatch", text, "decided")


def _comparisons(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Finding]:
    """Compare each setting with the first one, measure by measure."""
    settings = lines_of(runs, names)
    if len(settings) < 2:
        return
    if (why := why_not_compared(runs, names)) is not None:
        yield Finding("reward", why, "note")
        return
    shared = min(len(run.rollouts) for run in runs)
    if (why := why_undecided(shared)) is not None:
        yield Finding("reward", why, "note")
        return
    first, *others = settings
    found = [
        finding
        for measure in measures(runs)
        for other in others
        if (finding := _compared(measure, first, other, shared)) is not None
    ]
    if len(others) > MOST_COMPARISONS:
        decided = [finding for finding in found if finding.verdict == "decided"]
        num_open = len(found) - len(decided)
        text = f"{num_open} of {len(found)} comparisons with {first.label} are not decided."
        found = [*decided, *([Finding("reward", text, "open")] if num_open else [])]
    yield from found


def why_not_compared(runs: Sequence[Run], names: Sequence[str]) -> str | None:
    """Return why no number of these runs shows which setting is better, or None."""
    if keys := incomparable_keys(runs):
        return f"The runs differ in {', '.join(keys)}, so reward, length and mismatch are not compared."
    if mixed := [name for run, name in zip(runs, names, strict=True) if run.changes]:
        return f"Settings were changed on the way of {', '.join(mixed)}, so the runs are not compared."
    return None


def why_undecided(num_rollouts: int) -> str | None:
    """Return why runs of so many rollouts decide nothing, or None."""
    if num_rollouts >= MIN_ROLLOUTS:
        return None
    text = f"{num_rollouts} rollouts are too few to compare reward, length and masked share"
    return f"{text} (from {MIN_ROLLOUTS} on)."


def measures(runs: Sequence[Run]) -> list[Measure]:
    """Return the measures to compare, the ones that R3 changes first if the runs differ in R3.

    Masked shares are included if the algorithm differs, and speed if seconds may be compared.
    """
    keys = changed_keys(runs)
    mismatch = [Measure("mismatch", "Mean KL of the tokens trained on", _mean("mismatch/kl_k3"), _small)]
    masked = [Measure("masked", "Masked share, mean of both signs of the advantage", masked_share, _percent)]
    scores = scores_of(runs)
    speed = [Measure("speed", "Tokens per second", _closing("throughput/tokens_per_s"), _count)]
    return [
        *(mismatch if R3 in keys else ()),
        Measure("reward", f"Reward, mean of the last {LAST}", _closing("reward/mean"), _fraction),
        *(Measure("evaluation", f"Score on {n.split('/')[1]}", latest_score(n), _fraction) for n in scores),
        Measure("length", "Response length", _closing("rollout/response_length_mean"), "{:.1f}".format),
        *(() if R3 in keys else mismatch),
        *(masked if any(key.startswith("algorithm.") for key in keys) else ()),
        *([] if why_not_comparable(runs) else speed),
    ]


def scores_of(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of the runs' evaluations that are scores."""
    names = {name for run in runs for row in run.evaluations for name in row.values}
    scores = {name for name in names if name.startswith("eval/") and "/avg_at_" in name}
    return sorted(name for name in scores if not name.endswith(("_low", "_high")))


def _compared(measure: Measure, first: Line, other: Line, shared: int) -> Finding | None:
    """Return the sentence on two settings, or `None` if a run of either lacks the number."""
    seeds = [seed for seed in first.by_seed if seed in other.by_seed]
    is_paired = bool(seeds)
    befores = [measure.value(first.by_seed[seed], shared) for seed in seeds or first.by_seed]
    afters = [measure.value(other.by_seed[seed], shared) for seed in seeds or other.by_seed]
    before, after = (
        finite_mean(b for b in befores if b is not None),
        finite_mean(a for a in afters if a is not None),
    )
    if before is None or after is None or None in befores or None in afters:
        return None
    sides = [f"{measure.format(x)} ({setting.label})" for x, setting in ((before, first), (after, other))]
    head = f"{measure.words}: {' against '.join(sides)}"
    if abs(after - before) <= SUM_TO_ZERO or abs(after - before) < SAME * abs(before):
        return Finding(measure.topic, f"{head}: equal to within {SAME:.0%}.".replace("1%", "1 %"), "note")
    if not is_paired:
        return Finding(measure.topic, f"{head}: no seed in common, not decided.", "open")
    pairs = [(a, b) for a, b in zip(afters, befores, strict=True) if a is not None and b is not None]
    return _verdict(measure, head, [a for a, _ in pairs], [b for _, b in pairs])


def _verdict(measure: Measure, head: str, afters: Sequence[float], befores: Sequence[float]) -> Finding:
    if len(afters) == 1:
        return Finding(measure.topic, f"{head}: one seed, not decided.", "open")
    found = contrast(afters, befores)
    low, high = (_with_minus(measure.format(end)) for end in (found.low, found.high))
    interval = f"95 % interval of the difference {low} to {high}"
    if found.holds_zero:
        text = f"{head}: {found.num_pairs} seeds, not decided ({interval}){_seeds_to_decide(found)}."
        return Finding(measure.topic, text, "open")
    if not found.is_decided:
        text = (
            f"{head}: {found.num_pairs} seeds agree, too few to decide ({interval}){_seeds_to_decide(found)}."
        )
        return Finding(measure.topic, text, "open")
    word = "lower" if found.mean < 0 else "higher"
    return Finding(measure.topic, f"{head}: {word} ({found.num_pairs} seeds, {interval}).", "decided")


def _seeds_to_decide(found: Contrast) -> str:
    seeds = found.seeds_to_decide
    return "" if seeds is None else f"; about {seeds} seeds would decide a difference of this size"


def _one_run(run: Run) -> Iterator[Finding]:
    """Yield whether the reward of a single run rose or fell beyond the noise between its rollouts."""
    rewards = [value for value in over_rollouts(run, "reward/mean")[1] if math.isfinite(value)]
    if len(rewards) < MIN_ROLLOUTS:
        return
    first, last = rewards[:LAST], rewards[-LAST:]
    before, after = sum(first) / LAST, sum(last) / LAST
    noise = math.sqrt(sum((b - a) ** 2 for a, b in pairwise(rewards)) / (len(rewards) - 1) / 2)
    is_rounding = math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=SUM_TO_ZERO)
    is_beyond = not is_rounding and abs(after - before) > 3 * noise * math.sqrt(2 / LAST)
    what = f"from {_fraction(before)} (first {LAST} rollouts) to {_fraction(after)} (last {LAST})"
    if is_beyond:
        yield Finding("reward", f"Reward {'rose' if after > before else 'fell'} {what}.", "decided")
    else:
        yield Finding("reward", f"Reward went {what}: within the noise between rollouts.", "open")


def _stability(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Finding]:
    """Yield one sentence on alarms, skipped steps and roll-backs of all runs."""
    parts: list[str] = []
    for run, name in zip(runs, names, strict=True):
        said: list[str] = []
        if raised := alarms_of(run):
            said.append(f"{_number(len(raised), 'alarm')} ({_places(raised)})")
        if skipped := num_skipped_steps(run):
            said.append(f"{_number(skipped, 'gradient step')} skipped")
        if backs := num_roll_backs(run):
            said.append(f"{_number(backs, 'roll-back')}")
        if said:
            parts.append(f"{name}: {', '.join(said)}")
    if not parts:
        rollouts = min(len(run.rollouts) for run in runs)
        who = "The run" if len(runs) == 1 else "No run"
        verb = "raised no alarm and skipped no" if len(runs) == 1 else "raised an alarm or skipped a"
        yield Finding("stability", f"{who} {verb} gradient step in {_number(rollouts, 'rollout')}.", "note")
        return
    others = (
        ""
        if len(parts) == len(runs)
        else "; the others none"
        if len(runs) - len(parts) > 1
        else "; the other none"
    )
    yield Finding("stability", f"{'; '.join(parts)}{others}.", "warning")


def _warnings(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Finding]:
    for run, name in zip(runs, names, strict=True):
        yield from (Finding("warning", f"{name}: {text.rstrip('.')}.", "warning") for text in warnings_of(run))


def _speed(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Finding]:
    for run, name in zip(runs, names, strict=True):
        if text := anchor_cost(run):
            yield Finding("speed", f"{name}: {text}", "note")


def _places(raised: Sequence[Alarm]) -> str:
    """Return the first rollouts of each alarm, as in "tv_tail at rollouts 15, 34"."""
    by_name: dict[str, list[int]] = {}
    for alarm in raised:
        by_name.setdefault(alarm.name, []).append(alarm.rollout)
    return "; ".join(
        f"{name} at rollout{'' if len(places) == 1 else 's'} {', '.join(map(str, places[:MOST_PLACES]))}"
        f"{', …' if len(places) > MOST_PLACES else ''}"
        for name, places in by_name.items()
    )


def _closing(metric: str) -> Callable[[Run, int], float | None]:
    """Return a function that gives the mean of the last rollouts before the number that all runs have."""

    def value(run: Run, shared: int) -> float | None:
        rollouts, values = over_rollouts(run, metric)
        return finite_mean([v for x, v in zip(rollouts, values, strict=True) if x <= shared][-LAST:])

    return value


def _mean(metric: str) -> Callable[[Run, int], float | None]:
    def value(run: Run, shared: int) -> float | None:
        rollouts, values = over_rollouts(run, metric)
        return finite_mean(v for x, v in zip(rollouts, values, strict=True) if x <= shared)

    return value


def latest_score(metric: str) -> Callable[[Run, int], float | None]:
    """Return a function that gives an evaluation's last score within the rollouts that all runs have."""

    def value(run: Run, shared: int) -> float | None:
        rows = [row for row in run.evaluations if metric in row.values and row.rollout <= shared]
        return finite_mean([rows[-1].values[metric]]) if rows else None

    return value


def masked_share(run: Run, shared: int) -> float | None:
    """Return the share of the tokens that the trust region dropped: both signs of the advantage, averaged."""
    names = ("trust_region/masked_fraction_positive", "trust_region/masked_fraction_negative")
    means = [_mean(name)(run, shared) for name in names]
    known = [mean for mean in means if mean is not None]
    return sum(known) / len(known) if known else None


def _fraction(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def _small(value: float) -> str:
    text = f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.2g}"
    return text.replace("e-0", "e-")


def _with_minus(text: str) -> str:
    return f"\N{MINUS SIGN}{text[1:]}" if text.startswith("-") else text


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _signed(change: float) -> str:
    return f"{change:+.0%}".replace("%", " %").replace("-", "\N{MINUS SIGN}")


def _span(low: float, high: float) -> str:
    return f"{_signed(low)} to {_signed(high)}"
