"""The bound of staleness over thousands of samples: real producers in their threads, and delays by chance."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_dppo.rollout.staleness import OpenGroup, StalenessBound
from tests.support.concurrent_engines import Delays, SteppedEngine, Weights
from tests.support.ranks_on_threads import on_ranks
from tests.unit.test_ahead import Rank, Taken, require_bound_and_ledger

SLOWNESS = (1.0, 3.0, 0.5, 6.0)  # of each rank
VERSIONS = range(40)


@dataclass(frozen=True)
class LongTail(Delays):
    """One response of ten takes as long as several rollouts."""

    def length_of(self, request_id: str, longest: int) -> int:
        chance = random.Random(request_id)
        return chance.randint(longest // 2, longest) if chance.random() < 0.1 else chance.randint(1, 3)


@dataclass(frozen=True)
class Recorded(StalenessBound):
    """The rules, and what they chose on one rank."""

    choices: list[Sequence[OpenGroup]] = field(default_factory=list[Sequence[OpenGroup]])

    def choose(self, groups: Sequence[OpenGroup], version: int) -> list[OpenGroup] | None:
        found = super().choose(groups, version)
        if found is not None:
            self.choices.append(found)
        return found


@pytest.mark.parametrize(
    ("bound", "num_ranks"),
    [
        (StalenessBound(8, 1, 2), 1),
        (StalenessBound(8, 2, 1.5), 2),
        (StalenessBound(8, 1, 1), 4),
        (StalenessBound(8, 1, 2), 4),
        (StalenessBound(8, 2, 3), 4),
        (StalenessBound(8, 4, 2.5), 4),
    ],
    ids=str,
)
def test_over_640_samples_each_none_is_too_old_and_each_place_comes_once(
    bound: StalenessBound, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks sample, hold and train at different speeds; the slowest takes twelve times as long."""
    monkeypatch.setattr("megatron_dppo.rollout.scheduling._POLL_S", 0.002)
    weights = Weights()
    recorded = [Recorded(bound.prompts_per_rollout, bound.max_staleness, bound.over_sampling, [])] * num_ranks

    def work(data_parallel: Any) -> tuple[Taken, Rank]:
        number = data_parallel.peers.rank
        delays = LongTail(token_s=0.0003 * SLOWNESS[number], hold_s=0.001 * SLOWNESS[number])
        engine = SteppedEngine(number, weights=weights, delays=delays)
        recorded[number] = replace(recorded[number], choices=[])
        rank = Rank(recorded[number], data_parallel.peers, engine=engine, longest=40)
        try:
            return rank.run(VERSIONS, train_s=0.002 * SLOWNESS[-1 - number]), rank
        finally:
            rank.ahead.close()
            assert engine.num_open == 0

    ranks = on_ranks(work, tuple(range(num_ranks)))
    assert require_bound_and_ledger(ranks, bound, VERSIONS) == 640
    assert all(each.choices == recorded[0].choices for each in recorded)
    assert len(recorded[0].choices) == len(VERSIONS)
    assert sum(counts.num_continued for taken, _ in ranks for _, counts in taken) > 0  # pushes interrupted some
