"""Accumulates token statistics that merge over micro-batches and ranks.

Each rank adds its values, and ranks exchange `state()`. `Metrics().merge(states).values()` does not depend on
the distribution of tokens over ranks, because sums, counts, extremes and histogram counts can be merged. Only
the last bits of a sum may differ, by the order of float64 additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TypedDict

import torch
from torch import Tensor

LOWEST_EXPONENT, HIGHEST_EXPONENT = -8, 2  # bins span 1e-8 .. 100 on either side of 0
BINS_PER_DECADE = 100  # a bin's edges are 2.3 % apart
NUM_BINS = (HIGHEST_EXPONENT - LOWEST_EXPONENT) * BINS_PER_DECADE
OUTERMOST = NUM_BINS + 2
REPORTED_QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}  # suffix of the name -> quantile
RATIO_QUANTILES = {"min": 0.0, "p001": 0.001, "p999": 0.999, "max": 1.0}


class HistogramState(TypedDict):
    """State of a histogram, sent to other ranks."""

    counts: dict[int, int]
    smallest: float
    largest: float


class MetricsState(TypedDict):
    """State of a rank's metrics, sent to the other ranks: plain numbers only."""

    means: dict[str, tuple[float, float]]
    sums: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    histograms: dict[str, HistogramState]
    log_ratios: dict[str, HistogramState]


@dataclass
class Histogram:
    """Counts of values in log-spaced bins by sign, and the exact extremes.

    Bin 0 counts zeros, bin 1 values below 1e-8, and bin OUTERMOST values of 100 and more. Bin -n mirrors bin n.
    """

    counts: dict[int, int] = field(default_factory=dict[int, int])
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, values: Tensor) -> None:
        """Count each value of a tensor of any shape."""
        values = values.detach().flatten().double()
        if values.numel() == 0:
            return
        sizes = torch.bucketize(values.abs(), _bin_edges().to(values.device), right=True) + 1
        bins = torch.where(values < 0, -sizes, sizes).masked_fill(values == 0, 0)
        counts = torch.bincount(bins + OUTERMOST, minlength=2 * OUTERMOST + 1).tolist()
        smallest, largest = torch.stack(torch.aminmax(values)).tolist()
        own = {index - OUTERMOST: count for index, count in enumerate(counts) if count}
        self.merge({"counts": own, "smallest": smallest, "largest": largest})

    def merge(self, state: HistogramState) -> None:
        """Add another histogram's counts."""
        for index, count in state["counts"].items():
            self.counts[index] = self.counts.get(index, 0) + count
        self.smallest = -_largest(-self.smallest, -state["smallest"])
        self.largest = _largest(self.largest, state["largest"])

    @property
    def state(self) -> HistogramState:
        """Return the histogram as plain numbers."""
        return {"counts": dict(self.counts), "smallest": self.smallest, "largest": self.largest}

    def quantile(self, q: float) -> float:
        """Return a linear quantile like `torch.quantile`, exact to one bin. NaN if any value was NaN."""
        num_values = sum(self.counts.values())
        if num_values == 0 or math.isnan(self.largest):
            return math.nan
        position = q * (num_values - 1)
        low, weight = math.floor(position), position - math.floor(position)
        value = self._order_statistic(low, num_values)
        return value if weight == 0 else value + weight * (self._order_statistic(low + 1, num_values) - value)

    def _order_statistic(self, rank: int, num_values: int) -> float:
        """Return the value with `rank` values before it: exact at both ends, else its bin's middle."""
        if rank <= 0:
            return self.smallest
        if rank >= num_values - 1:
            return self.largest
        seen = 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if rank < seen:
                return min(max(_bin_middle(index), self.smallest), self.largest)
        raise AssertionError("rank is below the number of values")


class Metrics:
    """Named means, sums, extremes and histograms. `values()` returns the numbers to write."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._log_ratios: dict[str, Histogram] = {}

    def add_mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add to the mean `name`: the sum of totals divided by the sum of counts."""
        old_total, old_count = self._means.get(name, (0.0, 0.0))
        self._means[name] = (old_total + float(total), old_count + float(count))

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Add to the sum `name`."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_max(self, name: str, value: float | Tensor) -> None:
        """Raise the maximum `name` to `value`. A NaN stays."""
        self._maxima[name] = _largest(self._maxima.get(name, -math.inf), float(value))

    def add_min(self, name: str, value: float | Tensor) -> None:
        """Lower the minimum `name` to `value`. A NaN stays."""
        self._minima[name] = -_largest(-self._minima.get(name, math.inf), -float(value))

    def add_histogram(self, name: str, values: Tensor) -> None:
        """Count `values`. Reports `<name>_p50`, `_p99`, `_p999` and the exact `_max`."""
        self._histograms.setdefault(name, Histogram()).add(values)

    def add_log_ratios(self, name: str, log_ratios: Tensor) -> None:
        """Count log-ratios. Reports `<name>_p001`, `_p999` and the exact `_min` and `_max` of the ratios."""
        self._log_ratios.setdefault(name, Histogram()).add(log_ratios)

    def quantile(self, name: str, q: float) -> float:
        """Return a quantile of a histogram, or NaN if it is empty."""
        return self._histograms[name].quantile(q) if name in self._histograms else math.nan

    def state(self) -> MetricsState:
        """Return the state as plain numbers, for `all_gather_object`."""
        return {
            "means": dict(self._means),
            "sums": dict(self._sums),
            "maxima": dict(self._maxima),
            "minima": dict(self._minima),
            "histograms": {name: histogram.state for name, histogram in self._histograms.items()},
            "log_ratios": {name: histogram.state for name, histogram in self._log_ratios.items()},
        }

    def merge(self, others: Iterable[Metrics | MetricsState]) -> Metrics:
        """Add states to this object and return it. Gathered states include the rank's own, so start empty."""
        for other in others:
            state = other.state() if isinstance(other, Metrics) else other
            for name, (total, count) in state["means"].items():
                self.add_mean(name, total, count)
            for name, value in state["sums"].items():
                self.add_sum(name, value)
            for name, value in state["maxima"].items():
                self.add_max(name, value)
            for name, value in state["minima"].items():
                self.add_min(name, value)
            for name, histogram in state["histograms"].items():
                self._histograms.setdefault(name, Histogram()).merge(histogram)
            for name, histogram in state["log_ratios"].items():
                self._log_ratios.setdefault(name, Histogram()).merge(histogram)
        return self

    def values(self) -> dict[str, float]:
        """Return each metric as a number, sorted by name, without means over no values."""
        values = {name: total / count for name, (total, count) in self._means.items() if count != 0}
        values |= self._sums | self._maxima | self._minima
        for name, histogram in self._histograms.items():
            if histogram.counts:
                values |= {
                    f"{name}_{suffix}": histogram.quantile(q) for suffix, q in REPORTED_QUANTILES.items()
                }
        for name, histogram in self._log_ratios.items():
            if histogram.counts:
                for suffix, q in RATIO_QUANTILES.items():
                    values[f"{name}_{suffix}"] = math.exp(histogram.quantile(q))
        return dict(sorted(values.items()))


def _largest(a: float, b: float) -> float:
    """Return the larger of two numbers, or NaN if either is NaN, so that a broken token cannot hide."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@cache
def _bin_edges() -> Tensor:
    """Return the edges between bins 1, 2, .. OUTERMOST."""
    exponents = torch.arange(NUM_BINS + 1, dtype=torch.float64) / BINS_PER_DECADE + LOWEST_EXPONENT
    return torch.pow(torch.tensor(10.0, dtype=torch.float64), exponents)


def _bin_middle(index: int) -> float:
    """Return the geometric middle of a bin. For the outer bins of a sign, return their bounding edge."""
    if index < 0:
        return -_bin_middle(-index)
    if index == 0:
        return 0.0
    if index == 1:
        return 10.0**LOWEST_EXPONENT
    if index == OUTERMOST:
        return 10.0**HIGHEST_EXPONENT
    return 10.0 ** (LOWEST_EXPONENT + (index - 1.5) / BINS_PER_DECADE)
