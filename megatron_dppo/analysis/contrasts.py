"""Means over seeds with confidence intervals, and paired differences on equal seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
_SEED = 0  # the same figures give the same interval
_PERCENTS = (2.5, 97.5)
MIN_SEEDS = 6  # with 5 seeds, all signs are equal by chance with p = 2 * 0.5 ** 5 = 0.06
_Z_INTERVAL, _Z_POWER = 1.960, 0.842  # quantiles .975 and .80 of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and its 95 % bootstrap interval; NaN without seeds, no interval with one."""

    mean: float
    low: float
    high: float
    num_seeds: int


@dataclass(frozen=True)
class Contrast:
    """The mean difference of pairs, its interval, and its effect size."""

    mean: float
    low: float
    high: float
    effect_size: float  # Cohen's d_z: mean over standard deviation of the differences
    num_pairs: int

    @property
    def holds_zero(self) -> bool:
        """Whether the interval holds 0, or is unknown."""
        return not (self.low > 0 or self.high < 0)

    @property
    def is_decided(self) -> bool:
        """Whether enough pairs agree: MIN_SEEDS of them, and an interval without 0."""
        return self.num_pairs >= MIN_SEEDS and not self.holds_zero

    @property
    def seeds_to_decide(self) -> int | None:
        """Number of pairs at which a difference of this size is decided with a chance of 80 %.

        The sample size of a paired t test at the 5 % level (Guenther, The American Statistician 35(4), 1981),
        at least MIN_SEEDS. It is as uncertain as the effect size. None without two pairs that differ.
        """
        if not abs(self.effect_size) > 0:
            return None
        needed = ((_Z_INTERVAL + _Z_POWER) / self.effect_size) ** 2 + _Z_INTERVAL**2 / 2
        return max(MIN_SEEDS, math.ceil(needed))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent seeds; a value that is not finite makes it NaN, and is never left out."""
    known = np.asarray(values, dtype=np.float64)
    if known.size == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    low, high = _interval(known)
    return Estimate(float(known.mean()), low, high, known.size)


def contrast(values: Sequence[float], others: Sequence[float]) -> Contrast:
    """Return `values` minus `others` by pairs of runs with equal seeds, so that their common part cancels.

    A percentile bootstrap is too narrow with few pairs: treat an interval of five pairs as a hint.
    """
    differences = np.asarray(values, dtype=np.float64) - np.asarray(others, dtype=np.float64)
    assert differences.size > 0, "a contrast is of pairs"
    low, high = _interval(differences)
    spread = float(differences.std(ddof=1)) if differences.size > 1 else math.nan
    mean = float(differences.mean())
    effect = mean / spread if spread > 0 else math.nan
    return Contrast(mean, low, high, effect, differences.size)


@dataclass(frozen=True)
class PooledChange:
    """The relative change of a weighted mean, and its 95 % bootstrap interval over pairs; -0.5 halves it."""

    change: float
    low: float
    high: float
    num_pairs: int


def pooled_change(weights: Sequence[float], before: Sequence[float], after: Sequence[float]) -> PooledChange:
    """Return the change of the weighted mean from `before` to `after`, measured on the same tokens.

    Pairs are resampled together. NaN if a weighted mean of `before` is 0. One pair gives no interval.
    """
    w, a, b = (np.asarray(values, dtype=np.float64) for values in (weights, before, after))
    assert w.size == a.size == b.size > 0, "a change is of pairs"
    chosen = np.random.default_rng(_SEED).integers(w.size, size=(NUM_RESAMPLES, w.size))
    with np.errstate(divide="ignore", invalid="ignore"):
        change = float((w @ b) / (w @ a) - 1)
        resampled = (w * b)[chosen].sum(axis=1) / (w * a)[chosen].sum(axis=1) - 1
    if w.size < 2 or not np.isfinite(resampled).all():
        return PooledChange(change if math.isfinite(change) else math.nan, math.nan, math.nan, w.size)
    low, high = np.percentile(resampled, _PERCENTS)
    return PooledChange(change, float(low), float(high), w.size)


def mean_intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [P] ends of the intervals of means over S seeds of values [S, P], as `estimate` does."""
    num_seeds = len(values)
    chosen = np.random.default_rng(_SEED).integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    shares = np.stack([(chosen == seed).mean(axis=1) for seed in range(num_seeds)], axis=1)
    low, high = np.percentile(shares @ values, _PERCENTS, axis=0)
    return low, high


def _interval(values: np.ndarray) -> tuple[float, float]:
    if values.size < 2 or not np.isfinite(values).all():
        return math.nan, math.nan
    generator = np.random.default_rng(_SEED)
    chosen = generator.integers(values.size, size=(NUM_RESAMPLES, values.size))
    low, high = np.percentile(values[chosen].mean(axis=1), _PERCENTS)
    return float(low), float(high)
