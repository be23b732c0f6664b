"""The rules of the staleness bound: never above it, never stuck; and two others that are not as good."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.rollout.staleness import OpenGroup, Places, StalenessBound, upcoming_after

Choose = Callable[[Sequence[OpenGroup], int], list[OpenGroup] | None]
Limits = Callable[[Sequence[int], bool], list[int]]


@dataclass
class Group:
    place: int
    speed: float
    born: int | None = None
    is_whole: bool = False


@dataclass
class Outcome:
    is_stuck: bool = False
    excess: int = 0  # versions above the bound
    places: list[int] = field(default_factory=list[int])  # trained on, in their order
    num_begun: int = 0


def simulate(
    bound: StalenessBound,
    chance: random.Random,
    num_ranks: int,
    choose: Choose | None = None,
    limits: Limits | None = None,
) -> Outcome:
    """Twenty-five rollouts by ranks whose groups begin and end at random, by the bound's rules or others."""
    choose = choose or bound.choose
    limits = limits or (lambda counts, is_training: bound.limits(counts, 25, is_training=is_training))
    ranks: list[dict[int, Group]] = [{} for _ in range(num_ranks)]
    version, outcome = 0, Outcome()

    def admit(is_training: bool) -> None:
        for own, limit in zip(ranks, limits([len(own) for own in ranks], is_training), strict=True):
            while len(own) < limit:
                own[outcome.num_begun] = Group(outcome.num_begun, chance.uniform(0.05, 1))
                outcome.num_begun += 1

    def progress() -> None:
        for group in (group for own in ranks for group in own.values()):
            if group.born is None:
                group.born = version if chance.random() < 0.3 else None
            elif chance.random() < 0.3 * group.speed:
                group.is_whole = True

    admit(False)
    for _ in range(25):
        while True:
            table = [
                OpenGroup(rank, group.place, group.born, group.is_whole)
                for rank, own in enumerate(ranks)
                for group in own.values()
            ]
            chosen = choose(table, version)
            if chosen is not None:
                break
            if all(group.is_whole for group in table):
                return Outcome(True, outcome.excess, outcome.places, outcome.num_begun)
            progress()
        for group in chosen:
            assert group.born is not None
            outcome.excess = max(outcome.excess, version - group.born - bound.max_staleness)
            outcome.places.append(ranks[group.rank].pop(group.place).place)
        admit(True)
        for _ in range(chance.randint(0, 6)):
            progress()
        version += 1
        admit(False)
    return outcome


@st.composite
def bounds(draw: st.DrawFn, least: int = 0) -> StalenessBound:
    staleness = draw(st.integers(least, 5))
    return StalenessBound(draw(st.integers(1, 9)), staleness, draw(st.floats(1, staleness + 1)))


@settings(max_examples=150, deadline=None)
@given(bounds(), st.integers(1, 5), st.integers(0, 2**32))
def test_groups_are_trained_within_the_bound_and_no_wait_is_endless(
    bound: StalenessBound, num_ranks: int, seed: int
) -> None:
    outcome = simulate(bound, random.Random(seed), num_ranks)
    assert not outcome.is_stuck
    assert outcome.excess <= 0
    assert len(set(outcome.places)) == len(outcome.places) == 25 * bound.prompts_per_rollout


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32))
def test_without_staleness_rollouts_are_those_of_the_synchronous_loop(
    size: int, num_ranks: int, seed: int
) -> None:
    outcome = simulate(StalenessBound(size, 0), random.Random(seed), num_ranks)
    assert [sorted(outcome.places[i : i + size]) for i in range(0, 25 * size, size)] == [
        list(range(i, i + size)) for i in range(0, 25 * size, size)
    ]


def outcomes(rule: str) -> list[Outcome]:
    found = list[Outcome]()
    for seed in range(300):
        chance = random.Random(seed)
        size, num_ranks, staleness = chance.randint(1, 9), chance.randint(1, 5), chance.randint(0, 5)
        bound = StalenessBound(size, staleness, chance.uniform(1, staleness + 1))

        def fixed_shares(counts: Sequence[int], is_training: bool, bound: StalenessBound = bound) -> list[int]:
            total = bound.capacity(25, is_training=is_training)
            return [len(range(rank, total, len(counts))) for rank in range(len(counts))]

        def whole_first(
            groups: Sequence[OpenGroup], version: int, chance: random.Random = chance, size: int = size
        ) -> list[OpenGroup] | None:
            whole = [group for group in groups if group.is_whole]
            return chance.sample(whole, size) if len(whole) >= size else None

        found.append(
            simulate(
                bound,
                chance,
                num_ranks,
                whole_first if rule == "whole first" else None,
                fixed_shares if rule == "fixed shares" else None,
            )
        )
    return found


def test_counting_with_the_first_finished_groups_exceeds_the_bound() -> None:
    found = outcomes("whole first")
    assert sum(outcome.excess > 0 for outcome in found) > 100
    assert max(outcome.excess for outcome in found) > 5


def test_fixed_share_per_rank_deadlocks() -> None:
    found = outcomes("fixed shares")
    assert sum(outcome.is_stuck for outcome in found) > 5
    assert all(outcome.excess <= 0 for outcome in found)


@pytest.mark.parametrize(
    ("num_open", "is_training", "expected"), [([0, 0, 0], False, [3, 3, 2]), ([3, 0, 1], True, [3, 2, 2])]
)
def test_new_groups_go_to_the_ranks_with_the_fewest(
    num_open: list[int], is_training: bool, expected: list[int]
) -> None:
    bound = StalenessBound(4, 1, 1.75) if is_training else StalenessBound(4, 1, 2)
    limits = bound.limits(num_open, 9, is_training=is_training)
    if is_training:
        assert limits == [3, 0, 1]  # four may be open, and are
        limits = bound.limits(num_open, 9, is_training=False)
    assert limits == expected


@pytest.mark.parametrize("first", [0, 2])
def test_the_oldest_are_chosen_and_what_is_due_is_waited_for(first: int) -> None:
    bound = StalenessBound(2, 1, 2)
    young, old = OpenGroup(0, 5, first + 1, True), OpenGroup(1, 2, first, True)
    late, never = OpenGroup(0, 1, first, False), OpenGroup(1, 7, None, False)
    assert bound.choose([young, old, never], first + 1) == [old, young]
    assert bound.choose([young, old, late], first + 1) is None  # the last chance of `late`
    assert bound.choose([young, old, late], first) == [old, young]
    assert bound.choose([young, late, never], first) is None


@pytest.mark.parametrize(
    ("bound", "num_open"),
    [
        (StalenessBound(5, 4, 2.5), 13),  # 12.5 groups
        (StalenessBound(3, 2, 1.4), 5),  # 4.2
        (StalenessBound(3, 0, 1.4), 5),
        (StalenessBound(8, 1, 2.0), 16),
    ],
    ids=str,
)
def test_parts_of_a_group_are_rounded_up(bound: StalenessBound, num_open: int) -> None:
    assert bound.capacity(9, is_training=False) == num_open
    assert sum(bound.limits([0, 0, 0], 9, is_training=False)) == num_open


def test_the_last_rollouts_need_no_more_groups_than_they_have() -> None:
    bound = StalenessBound(4, 3, 4)
    assert [bound.capacity(left, is_training=False) for left in (9, 4, 3, 1, 0)] == [16, 16, 12, 4, 0]
    assert [bound.capacity(left, is_training=True) for left in (9, 3, 1, 0)] == [12, 12, 4, 0]


@given(st.data(), st.integers(1, 4), st.integers(0, 20), st.sets(st.integers(0, 19), max_size=6))
def test_ranks_share_the_upcoming_places_and_lose_none(
    data: st.DataObject, size: int, next_place: int, again: set[int]
) -> None:
    """Whatever each rank takes of them, and whichever of these are open."""
    repeated = sorted(place for place in again if place < next_place)
    ranks = [Places(next_place, repeated, (rank, size)) for rank in range(size)]
    taken = [[rank.take() for _ in range(data.draw(st.integers(0, 6)))] for rank in ranks]
    in_turn = [*repeated, *range(next_place, next_place + 6 * size)]
    assert all(in_turn[rank::size][: len(own)] == own for rank, own in enumerate(taken))
    opened = [[place for place in own if data.draw(st.booleans())] for own in taken]
    states = [
        rank.state([OpenGroup(0, place, None, is_whole=False) for place in places])
        for rank, places in zip(ranks, opened, strict=True)
    ]
    top, left = upcoming_after(states)
    used = {place for own, places in zip(taken, opened, strict=True) for place in own if place not in places}
    assert sorted([*used, *left]) == sorted({*repeated, *range(next_place, top)})
    assert top == max([next_place, *(place + 1 for own in taken for place in own)])
