"""Summarises a run in some twenty numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_dppo.analysis.lines import finite_mean, over_rollouts
from megatron_dppo.analysis.report.plots import PHASES
from megatron_dppo.run_folder.reader import Run, read_run

Format = Literal["count", "fraction", "share", "number", "length", "change", "seconds"]
LAST = 10  # rollouts in the closing mean: one rollout's reward is too noisy
Summary = dict[str, float | None]
_PAIRED = ("mismatch_live/num_tokens", "mismatch_live/kl_k3", "mismatch_replayed/kl_k3")
COUNTS = ("num_rollouts", "num_steps")


@dataclass(frozen=True)
class SummaryRow:
    """One line of the summary table."""

    key: str
    label: str
    format: Format
    metric: str = ""  # why it may be missing


ROWS = (
    SummaryRow("num_rollouts", "rollouts", "count"),
    SummaryRow("num_steps", "gradient steps", "count"),
    SummaryRow("reward_first", "reward, rollout 1", "fraction", "reward/mean"),
    SummaryRow("reward_last", f"reward, mean of the last {LAST}", "fraction", "reward/mean"),
    SummaryRow(
        "response_length_last",
        f"response length, mean of the last {LAST}",
        "length",
        "rollout/response_length_mean",
    ),
    SummaryRow("entropy_last", f"entropy, mean of the last {LAST}", "fraction", "policy/entropy"),
    SummaryRow("abs_prob_diff_mean", "|π − μ|, mean", "number", "mismatch/abs_prob_diff_mean"),
    SummaryRow("kl_k3_mean", "k3 KL, mean", "number", "mismatch/kl_k3"),
    SummaryRow("paired_kl_k3_live", "paired k3 KL, live routes", "number", "mismatch_live/kl_k3"),
    SummaryRow("paired_kl_k3_replayed", "paired k3 KL, replayed routes", "number", "mismatch_replayed/kl_k3"),
    SummaryRow("paired_kl_k3_change", "paired k3 KL, live → replayed", "change", "mismatch_replayed/kl_k3"),
    SummaryRow("ratio_max", "largest π/μ of the run", "number", "mismatch/ratio_max"),
    SummaryRow("ratio_min", "smallest π/μ of the run", "number", "mismatch/ratio_min"),
    SummaryRow(
        "noise_masked_mean", "masked before any update, mean", "share", "trust_region/noise_masked_fraction"
    ),
    SummaryRow("agreement_mean", "routing agreement, mean", "fraction", "routing/agreement_mean"),
    SummaryRow("rollout_s", "rollout, seconds", "seconds", "time/rollout_s"),
    SummaryRow("batch_s", "packing batches, seconds", "seconds", "time/batch_s"),
    SummaryRow("train_s", "training, seconds", "seconds", "time/train_s"),
    SummaryRow("sync_s", "weight sync, seconds", "seconds", "time/sync_s"),
    SummaryRow("tokens_per_s", "tokens per second", "count", "throughput/tokens_per_s"),
)


def summary(run: Run | Path) -> Summary:
    """Return the summary table's numbers by `ROWS` key, and two counts. `None` is a missing metric.

    Means are over rollouts, each counting the same, and skip values that are not finite (counted in
    `num_non_finite`). Only the paired KL is pooled by tokens, over the rollouts that hold both forwards.
    """
    run = run if isinstance(run, Run) else read_run(run)

    def values(metric: str) -> list[float]:
        return over_rollouts(run, metric)[1]

    rewards = values("reward/mean")
    live, replayed, num_tokens = paired_kl_k3(run)
    return {
        "num_rollouts": len(run.rollouts),
        "num_steps": len(run.steps),
        "reward_first": _first_reward(run),
        "reward_last": finite_mean(rewards[-LAST:]),
        "response_length_last": finite_mean(values("rollout/response_length_mean")[-LAST:]),
        "entropy_last": finite_mean(values("policy/entropy")[-LAST:]),
        "abs_prob_diff_mean": finite_mean(values("mismatch/abs_prob_diff_mean")),
        "kl_k3_mean": finite_mean(values("mismatch/kl_k3")),
        "paired_kl_k3_live": live,
        "paired_kl_k3_replayed": replayed,
        "paired_kl_k3_change": replayed / live - 1 if live and replayed is not None else None,
        "paired_num_tokens": num_tokens,
        "ratio_max": max(filter(math.isfinite, values("mismatch/ratio_max")), default=None),
        "ratio_min": min(filter(math.isfinite, values("mismatch/ratio_min")), default=None),
        "noise_masked_mean": finite_mean(values("trust_region/noise_masked_fraction")),
        "agreement_mean": finite_mean(values("routing/agreement_mean")),
        **{f"{phase}_s": finite_mean(values(f"time/{phase}_s")) for phase in PHASES},
        "tokens_per_s": finite_mean(values("throughput/tokens_per_s")),
        "num_non_finite": sum(
            not math.isfinite(value)
            for row in (*run.rollouts, *run.steps, *run.evaluations)
            for value in row.values.values()
        ),
    }


def num_shared(runs: Sequence[Run]) -> int | None:
    """Return the number of rollouts that all runs have, or `None` if all have the same number."""
    counts = {len(run.rollouts) for run in runs}
    return min(counts) if len(counts) > 1 else None


def up_to_shared(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without the rollouts that only some of them have: a longer run is no better one."""
    shared = num_shared(runs)
    if shared is None:
        return list(runs)
    last = min(run.rollouts[-1].rollout for run in runs) if shared else -1
    return [
        replace(
            run,
            rollouts=tuple(row for row in run.rollouts if row.rollout <= last),
            steps=tuple(row for row in run.steps if row.rollout <= last),
            evaluations=tuple(row for row in run.evaluations if row.rollout <= last + 1),
        )
        for run in runs
    ]


def paired_rows(run: Run) -> list[list[float]]:
    """Return tokens, k3 with live routes, and k3 with replayed ones, for each rollout with both forwards."""
    rows = [[row.values.get(name, math.nan) for name in _PAIRED] for row in run.rollouts]
    return [row for row in rows if all(map(math.isfinite, row)) and row[0] > 0]


def paired_kl_k3(run: Run) -> tuple[float | None, float | None, int]:
    """Return k3 with live and with replayed routes on the same tokens, pooled by tokens, and their number."""
    rows = paired_rows(run)
    if not rows:
        return None, None, 0
    num_tokens = sum(row[0] for row in rows)
    live, replayed = (sum(row[0] * row[column] for row in rows) / num_tokens for column in (1, 2))
    return live, replayed, int(num_tokens)


def _first_reward(run: Run) -> float | None:
    first = [row for row in run.rollouts if row.rollout == 0]
    return finite_mean(row.values["reward/mean"] for row in first if "reward/mean" in row.values)


def is_speed(row: SummaryRow) -> bool:
    """Return whether the row measures the machine's speed, not learning."""
    return row.format == "seconds" or row.key == "tokens_per_s"


def difference(before: float | None, after: float | None, style: Format) -> str:
    """Format what the second run has more than the first: fractions and counts plainly, others in percent."""
    if before is None or after is None:
        return "–"
    match style:
        case "count":
            text = f"{after - before:+,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
        case "fraction":
            text = f"{after - before:+.3f}"
        case "share":
            text = f"{100 * (after - before):+.2f} points"
        case "change":
            text = f"{100 * (after - before):+.0f} points"
        case _:
            text = _relative(after / before) if before else "–"
    is_none = not any(digit in text for digit in "123456789")
    return "=" if is_none and text != "–" else text.replace("-", "\N{MINUS SIGN}")


def _relative(ratio: float) -> str:
    """Format a ratio as percent, from the double on as a factor."""
    return f"× {ratio:.3g}" if ratio >= 2 else f"{ratio - 1:+.0%}".replace("%", " %")


def format_number(value: float | None, style: Format) -> str:
    """Format a number for the table."""
    if value is None:
        return "–"
    match style:
        case "count":
            return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
        case "fraction":
            return f"{value:.3f}"
        case "length":
            return f"{value:.1f}"
        case "share":
            return f"{value:.2%}".replace("%", " %")
        case "change":
            return f"{value:+.0%}".replace("%", " %").replace("-", "\N{MINUS SIGN}")
        case "number":
            return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")
        case "seconds":
            return f"{value:.3g}"
