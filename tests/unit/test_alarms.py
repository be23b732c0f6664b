"""Alarms: each sign is found at its step, and a run with the usual noise raises none."""

import json
import math
import random
from pathlib import Path

import pytest

from megatron_dppo.metrics.alarms import ENOUGH, RULES, WINDOW, AlarmWatch, _running_means, alarms, write_alarms

NUM_ROLLOUTS = 40


def _healthy(seed: int, num_rollouts: int = NUM_ROLLOUTS) -> list[dict[str, float]]:
    """A run that learns, as its rows would be."""
    noise = random.Random(seed)
    return [
        {
            "reward/mean": 0.35 + 0.5 * (1 - math.exp(-n / 10)) + noise.gauss(0, 0.03),
            "rollout/response_length_mean": 120 + 2 * n + noise.gauss(0, 8),
            "mismatch/tv_p999": 0.08 * math.exp(noise.gauss(0, 0.2)),
            "routing/agreement_mean": 0.94 + noise.gauss(0, 0.005),
        }
        for n in range(num_rollouts)
    ]


def _found(rows: list[dict[str, float]]) -> list[set[str]]:
    return [set(alarms(rows[:n], row)) for n, row in enumerate(rows)]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_raises_none(seed: int) -> None:
    assert not any(_found(_healthy(seed)))


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_falls_is_found_within_a_few_rollouts(seed: int) -> None:
    rows = _healthy(seed)
    for n, row in enumerate(rows[20:]):
        row["reward/mean"] = max(0.05, row["reward/mean"] - 0.08 * n)
    found = _found(rows)
    assert not any(found[:22])
    first = next(n for n, names in enumerate(found) if "reward_collapse" in names)
    assert first <= 30


@pytest.mark.parametrize("resumed_after", [0, 1, 30, 55])
def test_old_rows_keep_only_the_metrics_that_rules_read(resumed_after: int) -> None:
    """It raises what the complete rows raise, and its memory does not grow by complete rows."""
    rows = _healthy(3, 70)
    for n, row in enumerate(rows):
        row |= {"rollout/staleness_max": float(n % 3 == 0), **{f"other/{k}": 1.0 * k for k in range(50)}}
    for n, names in ((40, ("routing/agreement_mean",)), (45, ("rollout/response_length_mean",))):
        rows[n] |= {name: rows[n][name] / 3 for name in names}
    for row in rows[48:60]:
        row["mismatch/tv_p999"] *= 9
    for row in rows[60:]:
        row["reward/mean"] = 0.0
    found = [frozenset(alarms(rows[:n], row)) for n, row in enumerate(rows)]
    assert {name for names in found for name in names} == set(RULES)
    watch = AlarmWatch(rows[:resumed_after])
    for n, row in enumerate(rows[resumed_after:], start=resumed_after):
        new = found[n] - (found[n - 1] if n else frozenset())
        assert watch.check(row).keys() == new
        if new:
            whole = AlarmWatch()
            whole.rows += rows[: n + 1]
            assert watch.good_until(dict.fromkeys(new, "")) == whole.good_until(dict.fromkeys(new, ""))
    assert all(len(row) > 50 for row in watch.rows[-WINDOW - 1 :])
    assert all(len(row) <= 4 for row in watch.rows[: -WINDOW - 1])


def test_rounding_is_no_fall_of_a_constant_reward() -> None:
    rows = _healthy(0)
    for n, row in enumerate(rows):
        row["reward/mean"] = 0.1 + 0.2 if n < 25 else 0.3
    assert not any(_found(rows))


@pytest.mark.parametrize(("metric", "of_older"), [("mismatch/tv_p999", 0.6), ("routing/agreement_mean", 0.8)])
def test_stale_tokens_are_compared_with_stale_tokens(metric: str, of_older: float) -> None:
    rows = _healthy(0)
    for row in rows[20:]:
        row["rollout/staleness_max"], row[metric] = 2.0, of_older
    assert not any(_found(rows))
    for row in rows[37:]:
        row[metric] = 10 * of_older if "tv" in metric else of_older - 0.2
    assert len(_found(rows)[39]) == 1


@pytest.mark.parametrize(
    ("name", "metric", "value", "words"),
    [
        ("length_jump", "rollout/response_length_mean", 600.0, "found 600.0; usual was"),
        ("length_jump", "rollout/response_length_mean", 12.0, "found 12.0"),
        ("agreement_drop", "routing/agreement_mean", 0.8, "found 0.800; usual was 0.9"),
        ("not_finite", "policy/entropy", math.nan, "policy/entropy: found values that are not finite"),
        ("not_finite", "reward/mean", math.inf, "reward/mean: found"),
    ],
)
def test_each_sign_is_found_alone(name: str, metric: str, value: float, words: str) -> None:
    rows = _healthy(3)
    found = alarms(rows[:-1], rows[-1] | {metric: value})
    assert set(found) == {name} and words in found[name]
    assert set(alarms(rows, rows[-1], [{metric: value}])) == ({name} if name == "not_finite" else set())


def test_a_tail_that_stays_is_found_and_one_that_passes_is_not() -> None:
    """Of a rollout's tokens the largest few make its percentile: one large one proves nothing."""
    rows = _healthy(3)
    for number in (20, 21, 25, 30, 31):
        rows[number]["mismatch/tv_p999"] = 0.6
    assert not any(_found(rows))
    rows[32]["mismatch/tv_p999"] = 0.7
    (text,) = alarms(rows[:32], rows[32]).values()
    assert text.startswith("mismatch/tv_p999: found 0.6, 0.6, 0.7 in 3 rollouts in a row; usual was 0.0")
    assert AlarmWatch(rows[:33]).good_until({"tv_tail": text}) == 30


@pytest.mark.parametrize(
    ("metric", "usual", "value", "is_raised"),
    [
        ("rollout/response_length_mean", 120.0, 235.0, False),
        ("rollout/response_length_mean", 120.0, 245.0, True),
        ("rollout/response_length_mean", 120.0, 61.0, False),
        ("rollout/response_length_mean", 120.0, 59.0, True),
        ("mismatch/tv_p999", 0.04, 0.11, False),  # three times the usual value
        ("mismatch/tv_p999", 0.04, 0.13, True),
        ("mismatch/tv_p999", 0.001, 0.009, False),  # the floor
        ("mismatch/tv_p999", 0.001, 0.011, True),
        ("routing/agreement_mean", 0.94, 0.895, False),
        ("routing/agreement_mean", 0.94, 0.885, True),
        ("routing/agreement_mean", 0.94, 0.0, True),  # a value, and not the lack of one
        ("rollout/response_length_mean", 120.0, 0.0, True),
        ("mismatch/tv_p999", 0.0, 0.011, True),
    ],
)
def test_each_limit_lies_between_an_accepted_and_a_refused_value(
    metric: str, usual: float, value: float, is_raised: bool
) -> None:
    """Five rollouts make a usual value, and four do not."""
    num_needed = 3 if "tv" in metric else 1
    rows = [{metric: usual}] * 5 + [{metric: value}] * num_needed
    assert bool(alarms(rows[:-1], rows[-1])) is is_raised
    assert not alarms(rows[1:-1], rows[-1])


_RISE = [n / 100 for n in range(101)]
_NOISE = [0.5 + 0.1 * (-1) ** n for n in range(60)]


@pytest.mark.parametrize(
    ("rewards", "is_raised"),
    [
        ([*_RISE, *_RISE[55:][::-1]], False),  # 43 points lost of a gain of 97
        ([*_RISE, *_RISE[42:][::-1]], True),  # 56 points
        ([*_NOISE, *(reward - 0.22 for reward in _NOISE[:5])], False),  # three standard errors are .27
        ([*_NOISE, *(reward - 0.32 for reward in _NOISE[:5])], True),
        ([1.0] * 5 + [0.0] * 4, False),  # two means need ten rollouts
        ([1.0] * 5 + [0.0] * 5, True),
    ],
)
def test_a_fall_is_found_from_half_of_the_gain_and_three_standard_errors_on(
    rewards: list[float], is_raised: bool
) -> None:
    *history, row = [{"reward/mean": reward} for reward in rewards]
    assert ("reward_collapse" in alarms(history, row)) is is_raised


def test_rules_are_silent_without_history_or_metrics() -> None:
    row = _healthy(1, 1)[0]
    assert alarms([], row) == {} and alarms([{}] * 20, {}) == {}
    assert alarms([row] * 4, row | {"rollout/response_length_mean": 1e4}) == {}
    assert all(rule.__doc__ for rule in RULES.values())


def test_equal_engines_have_no_tail_to_grow() -> None:
    exact = [{"mismatch/tv_p999": 0.0}] * 8
    assert alarms(exact, {"mismatch/tv_p999": 1e-6}) == {}


def test_an_alarm_is_raised_once_while_it_lasts() -> None:
    rows = _healthy(4, 12)
    long = rows[-1] | {"rollout/response_length_mean": 900.0}
    watch = AlarmWatch(rows)
    watch.add_step({"loss/policy": math.nan})
    assert set(watch.check(long)) == {"length_jump", "not_finite"}
    assert watch.check(long) == {}
    assert watch.check(rows[-1]) == {}
    assert set(watch.check(long)) == {"length_jump"}


def test_steps_of_a_rollout_are_forgotten_with_it() -> None:
    rows = _healthy(4, 14)
    watch = AlarmWatch(rows[:11])
    raised = list[set[str]]()
    for row, loss in zip(rows[11:], (math.nan, 0.5, math.nan), strict=True):
        watch.add_step({"loss/policy": loss})
        raised.append(set(watch.check(row)))
    assert raised == [{"not_finite"}, set(), {"not_finite"}]


def test_the_evidence_holds_the_rows(tmp_path: Path) -> None:
    rows = [*_healthy(2, 20), {"reward/mean": math.nan}]
    file = write_alarms(tmp_path / "evidence", 20, {"not_finite": "reward/mean"}, rows)
    kept = json.loads(file.read_text())
    assert file.name == "alarm_rollout_000020.json"
    assert kept["alarms"] == {"not_finite": "reward/mean"} and len(kept["rows"]) == 11
    assert kept["rows"][-1] == {"reward/mean": "nan"} and kept["rows"][0] == rows[10]


def test_roll_back_target_precedes_the_alarm() -> None:
    rows = _healthy(0)
    for n, row in enumerate(rows[20:]):
        row["reward/mean"] = max(0.05, row["reward/mean"] - 0.08 * n)
    rewards = [row["reward/mean"] for row in rows[:31]]
    watch = AlarmWatch(rows[:31])
    best = max(range(5, 32), key=lambda finished: sum(rewards[finished - 5 : finished]))
    assert watch.good_until({"reward_collapse": "", "tv_tail": ""}) == best
    assert watch.good_until({"length_jump": ""}) == 30, "all but the rollout that was checked last"


@pytest.mark.parametrize("num_rewards", [0, ENOUGH - 1, ENOUGH, ENOUGH + 1, 3 * ENOUGH])
def test_running_means_reach_the_newest_reward(num_rewards: int) -> None:
    """They are means of ENOUGH known rewards, by the number of rollouts up to the last of these."""
    rewards: list[float | None] = [None if n % 5 == 2 else (n * n % 17) / 17 for n in range(num_rewards)]
    expected: dict[int, float] = {}
    for last in range(num_rewards):
        known = [value for value in rewards[: last + 1] if value is not None][-ENOUGH:]
        if rewards[last] is not None and len(known) == ENOUGH:
            expected[last + 1] = sum(known) / ENOUGH
    found = _running_means(rewards)
    assert found.keys() == expected.keys() and found == pytest.approx(expected)
