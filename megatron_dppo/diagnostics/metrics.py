"""Statistics of tokens that can be gathered in pieces, on many ranks, and merged.

Each rank adds what it saw, ranks exchange `state()`, and `Metrics().merge(states).values()` is the same
whichever rank held which token: sums, counts, extremes and histogram counts all add up. Only the last bits
of a sum may differ, by the order of float64 additions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TypedDict

import torch
from torch import Tensor

LOWEST_EXPONENT = -8  # bins span 1e-8 .. 1
BINS_PER_DECADE = 100  # a bin's edges are 2.3 % apart
NUM_BINS = -LOWEST_EXPONENT * BINS_PER_DECADE
REPORTED_QUANTILES = {"p999": 0.999}  # suffix of the metric's name -> quantile


class HistogramState(TypedDict):
    """What a histogram sends to other ranks."""

    counts: dict[int, int]
    largest: float


class MetricsState(TypedDict):
    """What one rank sends to the others: plain numbers only."""

    means: dict[str, tuple[float, float]]
    sums: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    histograms: dict[str, HistogramState]


@dataclass
class Histogram:
    """Counts of non-negative values in log-spaced bins, and the exact largest value.

    Bin 0 holds zeros, bin 1 values below 1e-8, bin NUM_BINS + 2 values of 1 and more.
    """

    counts: dict[int, int] = field(default_factory=dict[int, int])
    largest: float = -math.inf

    def add(self, values: Tensor) -> None:
        """Count each value of a tensor of any shape."""
        values = values.detach().flatten().double()
        if values.numel() == 0:
            return
        edges = _bin_edges().to(values.device)
        bins = torch.where(values == 0, 0, torch.bucketize(values, edges, right=True) + 1)
        counts = torch.bincount(bins, minlength=NUM_BINS + 3).tolist()
        self._merge({index: count for index, count in enumerate(counts) if count}, float(values.max()))

    def merge(self, state: HistogramState) -> None:
        """Add another histogram's counts."""
        self._merge(state["counts"], state["largest"])

    def _merge(self, counts: Mapping[int, int], largest: float) -> None:
        for index, count in counts.items():
            self.counts[index] = self.counts.get(index, 0) + count
        self.largest = _largest(self.largest, largest)

    def quantile(self, q: float) -> float:
        """As `torch.quantile` (linear between neighbours), right to within one bin; NaN if a value was."""
        num_values = sum(self.counts.values())
        if num_values == 0 or math.isnan(self.largest):
            return math.nan
        position = q * (num_values - 1)
        low, weight = math.floor(position), position - math.floor(position)
        value = self._order_statistic(low, num_values)
        return value if weight == 0 else value + weight * (self._order_statistic(low + 1, num_values) - value)

    def _order_statistic(self, rank: int, num_values: int) -> float:
        """The value with `rank` values before it, as its bin's middle."""
        if rank >= num_values - 1:
            return self.largest
        seen = 0
        for index in sorted(self.counts):
            seen += self.counts[index]
            if rank < seen:
                return min(_bin_middle(index), self.largest)
        raise AssertionError("rank is below the number of values")


class Metrics:
    """Named means, sums, extremes and histograms; `values()` gives the numbers to write down."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._minima: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}

    def add_mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """Add to `name`, which is the sum of totals over the sum of counts."""
        old_total, old_count = self._means.get(name, (0.0, 0.0))
        self._means[name] = (old_total + float(total), old_count + float(count))

    def add_sum(self, name: str, value: float | Tensor) -> None:
        """Add to `name`, a plain sum."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_max(self, name: str, value: float | Tensor) -> None:
        """Raise `name` to `value`; a NaN stays."""
        self._maxima[name] = _largest(self._maxima.get(name, -math.inf), float(value))

    def add_min(self, name: str, value: float | Tensor) -> None:
        """Lower `name` to `value`; a NaN stays."""
        self._minima[name] = -_largest(-self._minima.get(name, math.inf), -float(value))

    def add_histogram(self, name: str, values: Tensor) -> None:
        """Count non-negative `values`; reported as `<name>_p999` and the exact `<name>_max`."""
        self._histograms.setdefault(name, Histogram()).add(values)

    def quantile(self, name: str, q: float) -> float:
        """Any quantile of a histogram; NaN where it holds nothing."""
        return self._histograms[name].quantile(q) if name in self._histograms else math.nan

    def state(self) -> MetricsState:
        """All of it as plain numbers, for `all_gather_object`."""
        return {
            "means": dict(self._means),
            "sums": dict(self._sums),
            "maxima": dict(self._maxima),
            "minima": dict(self._minima),
            "histograms": {
                name: {"counts": dict(histogram.counts), "largest": histogram.largest}
                for name, histogram in self._histograms.items()
            },
        }

    def merge(self, others: Iterable[Metrics | MetricsState]) -> Metrics:
        """Add the others to this one and return it; gathered states include one's own, so start empty."""
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
        return self

    def values(self) -> dict[str, float]:
        """Each metric as a number, sorted by name; a mean over nothing is left out."""
        values = {name: total / count for name, (total, count) in self._means.items() if count != 0}
        values |= self._sums | self._maxima | self._minima
        for name, histogram in self._histograms.items():
            if histogram.counts:
                values[f"{name}_max"] = histogram.largest
                for suffix, q in REPORTED_QUANTILES.items():
                    values[f"{name}_{suffix}"] = histogram.quantile(q)
        return dict(sorted(values.items()))


def _largest(a: float, b: float) -> float:
    """Larger of two numbers; NaN if either is, so that a broken token cannot hide."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@cache
def _bin_edges() -> Tensor:
    """Edges between bins 1, 2, .. NUM_BINS + 2."""
    exponents = torch.arange(NUM_BINS + 1, dtype=torch.float64) / BINS_PER_DECADE + LOWEST_EXPONENT
    return torch.pow(torch.tensor(10.0, dtype=torch.float64), exponents)


def _bin_middle(index: int) -> float:
    """Geometric middle of a bin; the outer bins give the edge that bounds them."""
    if index == 0:
        return 0.0
    if index == 1:
        return 10.0**LOWEST_EXPONENT
    if index == NUM_BINS + 2:
        return 1.0
    return 10.0 ** (LOWEST_EXPONENT + (index - 1.5) / BINS_PER_DECADE)
