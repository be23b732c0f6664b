"""Groups runs that differ in their seed alone: means with intervals, and contrasts on equal seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.analysis.contrasts import Contrast, Estimate, contrast, estimate
from megatron_dppo.analysis.report.names import experiment_of
from megatron_dppo.analysis.report.summary import LAST, formatted, summary, up_to_shared
from megatron_dppo.analysis.report.text import differing_keys
from megatron_dppo.config.load import shown
from megatron_dppo.run_folder.reader import Run

# Keys of `summary.summary`.
_FIGURES: Mapping[str, str] = {
    "reward_last": f"reward, last {LAST}",
    "response_length_last": f"response length, last {LAST}",
    "entropy_last": f"entropy, last {LAST}",
    "abs_prob_diff_mean": "|π − μ|",
    "kl_k3_mean": "k3 KL",
    "agreement_mean": "routing agreement",
}
MIN_PAIRS = 2


@dataclass(frozen=True)
class Setting:
    """Runs with the same settings; of two with the same seed, the later in the report's order counts."""

    label: str
    by_seed: Mapping[str, Mapping[str, float | None]]  # seed -> summary


@dataclass(frozen=True)
class SeedRow:
    """One line of a table: a text, and cells in the order of `columns`."""

    label: str
    cells: Sequence[str]


@dataclass(frozen=True)
class SeedTables:
    """The report's tables of means and contrasts over seeds."""

    columns: Sequence[str]  # of both
    means: Sequence[SeedRow]
    contrasts: Sequence[SeedRow]  # none without settings that share seeds


def seed_tables(runs: Sequence[Run]) -> SeedTables | None:
    """Return both tables over the rollouts that all runs have, or `None` if no setting has two seeds."""
    settings = _settings(up_to_shared(runs))
    if max((len(setting.by_seed) for setting in settings), default=0) < MIN_PAIRS:
        return None
    keys = [key for key in _FIGURES if any(s[key] is not None for x in settings for s in x.by_seed.values())]
    means = [_means(setting, keys) for setting in settings]
    first, *others = settings
    contrasts = [row for other in others if (row := _contrasts(other, first, keys)) is not None]
    return SeedTables(["seeds", *(_FIGURES[key] for key in keys)], means, contrasts)


def _settings(runs: Sequence[Run]) -> list[Setting]:
    """Return each setting under the values of the keys on which settings differ."""
    configs = [experiment_of(run) for run in runs]
    differing = differing_keys(configs)
    grouped: dict[str, dict[str, Mapping[str, float | None]]] = {}
    for run, config in zip(runs, configs, strict=True):
        values = (f"{key.rpartition('.')[2]} {shown(config.get(key))}" for key in differing)
        label = ", ".join(values) or "all runs"
        grouped.setdefault(label, {})[shown(run.option("run.seed"))] = summary(run)
    return [Setting(label, by_seed) for label, by_seed in grouped.items()]


def _means(setting: Setting, keys: Sequence[str]) -> SeedRow:
    cells = [_shown(estimate(known)) if (known := _known(setting, key)) else "–" for key in keys]
    return SeedRow(setting.label, [str(len(setting.by_seed)), *cells])


def _known(setting: Setting, key: str) -> list[float]:
    return [value for figures in setting.by_seed.values() if (value := figures[key]) is not None]


def _contrasts(setting: Setting, base: Setting, keys: Sequence[str]) -> SeedRow | None:
    seeds = [seed for seed in setting.by_seed if seed in base.by_seed]
    if len(seeds) < MIN_PAIRS:
        return None
    cells: list[str] = []
    for key in keys:
        pairs = [(setting.by_seed[seed][key], base.by_seed[seed][key]) for seed in seeds]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        cells.append(_shown_contrast(contrast(*zip(*known, strict=True))) if len(known) >= MIN_PAIRS else "–")
    return SeedRow(f"{setting.label} − {base.label}", [str(len(seeds)), *cells])


def _shown(value: Estimate) -> str:
    return f"{formatted(value.mean, 'number')}{_interval(value.low, value.high)}"


def _shown_contrast(value: Contrast) -> str:
    effect = "" if math.isnan(value.effect_size) else f"; d {formatted(value.effect_size, 'number')}"
    return f"{formatted(value.mean, 'number')}{_interval(value.low, value.high)}{effect}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f" [{formatted(low, 'number')}, {formatted(high, 'number')}]"
