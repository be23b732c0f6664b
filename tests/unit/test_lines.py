"""Lines of the report and of the figures: their runs, and how curves are smoothed and averaged."""

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.analysis.contrasts import estimate, mean_intervals
from megatron_dppo.analysis.lines import can_be_logarithmic, curve_of, lines_of, run_names, smooth
from megatron_dppo.run_folder.reader import Run


def test_smoothing_keeps_levels_and_lines_from_the_first_point_on() -> None:
    places = [0.0, 2.0, 3.0, 7.0, 8.0, 9.0, 15.0, 16.0, 20.0, 21.0, 30.0]
    line = [0.5 + 0.03 * x for x in places]
    assert smooth(line, places) == pytest.approx(line, rel=1e-12)
    assert smooth(len(places) * [0.7]) == pytest.approx(len(places) * [0.7], rel=1e-12)
    exponential = [math.exp(y) for y in line]
    assert smooth(exponential, places, is_log=True) == pytest.approx(exponential, rel=1e-12)
    gap = [*line[:4], math.nan, *line[5:]]
    assert smooth(gap, places) == pytest.approx(line, rel=1e-12), "a gap is bridged"
    noise = random.Random(1)
    noisy = [noise.random() for _ in range(50)]
    assert min(noisy) <= min(smooth(noisy)) and max(smooth(noisy)) <= max(noisy)
    assert sum(abs(b - a) for a, b in pairwise(smooth(noisy))) < sum(abs(b - a) for a, b in pairwise(noisy)) / 3
    assert smooth([math.nan, math.nan])[0] != smooth([1.0, math.nan])[0] == 1.0


def test_the_interval_is_that_of_the_contrasts() -> None:
    values = np.random.default_rng(0).random((4, 5))
    low, high = mean_intervals(values)
    for place, column in enumerate(values.T):
        expected = estimate(column.tolist())
        assert (low[place], high[place]) == pytest.approx((expected.low, expected.high))


def test_curve_is_the_mean_of_smoothed_seeds_over_common_rollouts() -> None:
    noise = random.Random(2)
    x = [1.0 + n for n in range(11)]
    seeds = [(x, [noise.random() for _ in x]), (x[:-1], [noise.random() for _ in x[:-1]])]
    curve = curve_of(seeds, "reward/mean")
    assert curve is not None and curve.is_smoothed and curve.num_seeds == 2
    assert curve.x.tolist() == x[:-1]
    own = [y[: len(x) - 1] for _, y in seeds]
    np.testing.assert_allclose(curve.raw, np.mean(own, axis=0))
    np.testing.assert_allclose(curve.mean, np.mean([smooth(y, x[:-1]) for y in own], axis=0))
    assert curve.low is not None and curve.high is not None
    assert (curve.low <= curve.mean + 1e-12).all() and (curve.mean <= curve.high + 1e-12).all()
    assert curve_of([], "reward/mean") is None and curve_of([([1.0], [0.5]), ([2.0], [0.5])], "a/b") is None


@pytest.mark.parametrize(("metric", "num_points"), [("eval/aime24/pass_at_16", 30), ("reward/mean", 9)])
def test_evaluations_and_short_curves_are_not_smoothed(metric: str, num_points: int) -> None:
    values = [float(n % 3) for n in range(num_points)]
    values[1] = math.inf
    curve = curve_of([([float(n) for n in range(num_points)], values)], metric)
    assert curve is not None and not curve.is_smoothed and curve.low is None
    assert math.isnan(curve.raw[1]), "a gap"
    np.testing.assert_array_equal(curve.mean, curve.raw)


def test_a_logarithmic_axis_shows_every_finite_value() -> None:
    assert can_be_logarithmic([0.5, math.nan, math.inf])
    assert not can_be_logarithmic([0.5, 0.0]) and not can_be_logarithmic([math.nan])


def test_runs_that_differ_only_in_their_seed_are_one_line() -> None:
    """The later of two runs with one seed counts, and the planned length only under a decay."""

    def run(name: str, seed: int, preset: str, num_rollouts: int, schedule: str = "constant") -> Run:
        config: dict[str, Any] = {
            "run": {"seed": seed, "num_rollouts": num_rollouts, "folder": name},
            "algorithm": {"preset": preset},
            "optimizer": {"schedule": schedule},
        }
        return Run(name, Path(name), config, {}, (), (), ())

    runs = [run("a", 1, "grpo", 5), run("b", 2, "grpo", 9), run("c", 2, "grpo", 5), run("d", 1, "pg_is", 5)]
    grpo, other = lines_of(runs, run_names(runs))
    assert (grpo.label, grpo.places, other.label, other.places) == ("grpo", (0, 1, 2), "pg_is", (3,))
    assert {seed: own.path.name for seed, own in grpo.by_seed.items()} == {"1": "a", "2": "c"}
    (alone,) = lines_of(runs[:3], run_names(runs[:3]))
    assert alone.label == "all runs"
    decaying = [run("a", 1, "grpo", 5, "cosine"), run("b", 2, "grpo", 9, "cosine")]
    assert len(lines_of(decaying, run_names(decaying))) == 2
