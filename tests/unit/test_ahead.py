"""Sampling ahead, with an engine of the test's own: bounds, places, stops, faults."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.engines.base import Request, SamplingParams, give_up, input_tokens, num_tokens_before
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rewards import RewardResult
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scheduling import Scheduler, run_to_end
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.rollout.staleness import StalenessBound
from megatron_dppo.types import DataCursor, Prompt, Sample, SampleGroup
from tests.support.collecting import ask_once
from tests.support.concurrent_engines import Delays, SteppedEngine, SteppedSession
from tests.support.processes import wait_until
from tests.support.ranks_on_threads import Meeting, Peer, on_ranks
from tests.support.samples import InProcessScorer
from tests.support.word_tokenizers import TOKENIZER

PROMPTS = [Prompt(str(i), "408", "test", text="<bos> 2 1 * 4 3 =") for i in range(40)]
TOO_LONG = "<bos> 2 1 * 4 3 * 4 3 ="
Taken = list[tuple[list[SampleGroup], RolloutCounts]]


class Rank:
    """One rank of a run, from a cursor on."""

    def __init__(
        self,
        bound: StalenessBound,
        peer: Peer,
        cursor: DataCursor | None = None,
        *,
        engine: SteppedEngine | None = None,
        prompts: Sequence[Prompt] = PROMPTS,
        reward: Callable[[str], float] = lambda prompt: random.random(),
        max_replaced: int = 0,
        longest: int = 12,
    ) -> None:
        size, self.peer, self.engine = peer.meeting.world_size, peer, engine or SteppedEngine(peer.rank)
        stream = PromptStream(prompts, 0, shuffle=False, cursor=cursor)
        scorer = InProcessScorer(lambda prompt, response, finish_reason: RewardResult(reward(prompt.id)))

        self.sampler = GroupSampler(
            self.engine.session,
            ask_once,
            Scorer(TOKENIZER, scorer, False, None),
            SamplingParams(longest),
        )
        maker, share = GroupMaker(TOKENIZER, 2, max_prompt_tokens=7, seed=0), (peer.rank, size)
        self.producer = Producer(
            *(maker, self.sampler, stream, share), max_replaced=max_replaced, in_rounds=bound.takes_all
        )
        self.ahead = Scheduler(bound, self.producer, 2)
        self.cursor = self.ahead.cursor
        self.metrics: dict[str, list[float]] = {}

    def push(self, version: int, num_left: int) -> None:
        with self.ahead.pause(version, num_left):
            self.peer.all_gather(None)  # no rank is pushed to while another samples
            self.engine.weights.version = version
            self.peer.all_gather(None)
        self.keep_metrics()

    def keep_metrics(self) -> None:
        """Keep what the last push or rollout measured, by name."""
        for name, value in self.ahead.metrics.values().items():
            self.metrics.setdefault(name, []).append(value)

    def run(self, versions: range, train_s: float = 0.0) -> Taken:
        """Rollouts at these versions; the last ends the run."""
        taken, chance = Taken(), random.Random(self.peer.rank)
        self.push(versions.start, len(versions))
        for version in versions:
            found = self.ahead.next(version, version, self.peer.all_gather, run_to_end)
            assert found is not None
            taken.append(found)
            self.keep_metrics()
            self.cursor = self.ahead.cursor
            asyncio.run(asyncio.sleep(train_s * chance.random()))
            self.push(version + 1, versions.stop - version - 1)
        return taken


def run_ranks(
    bound: StalenessBound, num_ranks: int, versions: range, **options: Any
) -> list[tuple[Taken, Rank]]:
    def work(data_parallel: Any) -> tuple[Taken, Rank]:
        rank = Rank(bound, data_parallel.peers, **options)
        try:
            return rank.run(versions, train_s=0.02), rank
        finally:
            rank.ahead.close()
            assert rank.engine.num_open == 0

    return on_ranks(work, tuple(range(num_ranks)))


def place_of(sample_id: str) -> int:
    return int(sample_id.removeprefix("place").partition("+")[0])


@pytest.mark.parametrize(
    ("bound", "num_ranks"),
    [
        (StalenessBound(4, 1), 1),
        (StalenessBound(3, 2, 3), 2),
        (StalenessBound(5, 4, 2.5), 3),
        (StalenessBound(2, 1, 2), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 3])
def test_no_token_is_older_than_the_bound_and_each_place_is_trained_on_once(
    bound: StalenessBound, num_ranks: int, first: int
) -> None:
    """Of groups that begin with version 0, too."""
    versions = range(first, first + 12)
    ranks = run_ranks(bound, num_ranks, versions)
    assert require_bound_and_ledger(ranks, bound, versions) == len(versions) * bound.prompts_per_rollout * 2
    # Some were sampled by several versions, and some before their rollout's turn.
    counts = [counts for taken, _ in ranks for _, counts in taken]
    assert sum(count.num_continued for count in counts) > 0
    require_metrics(ranks, bound)


def require_metrics(ranks: Sequence[tuple[Taken, Rank]], bound: StalenessBound) -> None:
    """Shares and counts fit each other and what was taken."""
    for _, rank in ranks:
        named, size = rank.metrics, bound.prompts_per_rollout
        ages = zip(*(named[f"staleness/{age}"] for age in range(bound.max_staleness + 1)), strict=True)
        assert all(sum(shares) == pytest.approx(1) for shares in ages)
        limits = zip(named["rollout/whole_groups"], named["rollout/open_groups"], strict=True)
        assert all(size <= whole <= num_open for whole, num_open in limits)
        busy = zip(named["engine/busy_in_training"], named["engine/requests_in_training"], strict=True)
        assert all(0 <= share <= min(1, num_requests) + 1e-9 for share, num_requests in busy)
        assert min(named["sync/hold_s"]) > 0
    summed = "engine/busy_in_training", "rollout/interrupted", "rollout/prefilled_again_tokens"
    total = {name: sum(sum(rank.metrics[name]) for _, rank in ranks) for name in summed}
    assert total["engine/busy_in_training"] > 0
    # Each interrupted response is sent again with its tokens, of which the stand-in caches none.
    assert total["rollout/prefilled_again_tokens"] >= total["rollout/interrupted"] > 0


def require_bound_and_ledger(
    ranks: Sequence[tuple[Taken, Rank]], bound: StalenessBound, versions: range
) -> int:
    """Require that no token is too old or mislabelled, and each prompt index comes once; count the samples."""
    trained, num_samples = list[int](), 0
    for rollout, version in enumerate(versions):
        groups = [group for taken, _ in ranks for group in taken[rollout][0]]
        assert sorted(group.index for group in groups) == list(range(bound.prompts_per_rollout))
        trained += [place_of(group.samples[0].id) for group in groups]
        for sample in (sample for group in groups for sample in group.samples):
            num_samples += 1
            assert [span.start for span in sample.weight_versions[1:]] == [
                span.stop for span in sample.weight_versions[:-1]
            ]
            for span in sample.weight_versions:
                assert 0 <= version - span.version <= bound.max_staleness
                response = sample.tokens[sample.prompt_length :]
                assert set(response[span.start : span.stop].tolist()) == {span.version + 1}
    assert len(set(trained)) == len(trained) == len(versions) * bound.prompts_per_rollout
    (cursor,) = {str(rank.cursor): rank.cursor for _, rank in ranks}.values()
    top, again = PromptStream(PROMPTS, 0, shuffle=False, cursor=cursor).upcoming
    assert sorted([*trained, *again]) == list(range(top))  # none is lost, and none comes twice
    assert begun_places(rank.engine for _, rank in ranks) == set(trained)
    return num_samples


def begun_places(engines: Iterable[SteppedEngine]) -> set[int]:
    """Places of all requests that engines received."""
    sessions = (session for engine in engines for session in engine.sessions)
    return {place_of(request) for session in sessions for request in session.asked}


@pytest.mark.parametrize(
    ("bound", "num_ranks"),
    [
        (StalenessBound(4, 1, 2), 1),
        (StalenessBound(3, 2, 3), 1),
        (StalenessBound(4, 3, 2.5), 2),
        (StalenessBound(5, 2, 2), 3),
    ],
    ids=str,
)
def test_each_started_group_is_trained_on_or_replaced(bound: StalenessBound, num_ranks: int) -> None:
    """Stopped twice and resumed. Groups whose rewards are equal are replaced, and begin in addition."""
    num_rollouts, size, cursor = 7, bound.prompts_per_rollout, None
    trained, begun, replaced, too_long = list[int](), set[int](), 0, 0
    prompts = [replace(p, text=TOO_LONG) if i % 6 == 4 else p for i, p in enumerate([*PROMPTS, *PROMPTS])]

    def work(data_parallel: Any, cursor: Any, versions: range) -> Any:
        rewards = iter(range(10**6))
        rank = Rank(
            bound,
            data_parallel.peers,
            cursor,
            prompts=[replace(prompt, id=str(number)) for number, prompt in enumerate(prompts)],
            reward=lambda prompt: 0.0 if int(prompt) % 7 == 3 else float(next(rewards)),
            max_replaced=9,
        )
        found, left_out = list[SampleGroup](), Counter[str]()
        rank.push(versions.start, num_rollouts - versions.start)
        for version in versions:
            taken = rank.ahead.next(version, version, rank.peer.all_gather, run_to_end)
            assert taken is not None
            found += taken[0]
            left_out["replaced"] += taken[1].num_replaced_groups
            left_out["too long"] += taken[1].num_prompts_too_long
            if version < versions.stop - 1 or versions.stop == num_rollouts:
                rank.push(version + 1, num_rollouts - version - 1)
        rank.ahead.close()
        return found, left_out, rank.engine, rank.ahead.cursor

    for versions in (range(2), range(2, 3), range(3, num_rollouts)):
        ranks = on_ranks(partial(work, cursor=cursor, versions=versions), tuple(range(num_ranks)))
        trained += [place_of(group.samples[0].id) for groups, *_ in ranks for group in groups]
        replaced += sum(left_out["replaced"] for _, left_out, *_ in ranks)
        too_long += sum(left_out["too long"] for _, left_out, *_ in ranks)
        begun |= begun_places(engine for _, _, engine, _ in ranks)
        cursor = ranks[0][3]
    assert len(set(trained)) == len(trained) == num_rollouts * size
    top, again = PromptStream(prompts, 0, shuffle=False, cursor=cursor).upcoming
    is_equal = {place for place in begun if place % 7 == 3}
    assert begun == set(trained) | is_equal and replaced >= len(is_equal) > 0
    drawn = set(range(top)) - set(again)
    assert begun == {place for place in drawn if place % 6 != 4} and too_long >= len(drawn - begun) > 0


def test_oldest_groups_are_requested_first_after_a_push() -> None:
    """In whatever order they came back: a server with a queue would let the youngest pass at each push."""
    rank, before, num_again = Rank(StalenessBound(4, 3, 4), Peer(0, Meeting(1)), longest=10**6), set[str](), 0
    for version in range(6):
        rank.push(version, 9)
        wait_until(lambda: len(rank.engine.sessions[-1].asked) >= 2 * 16, 60)
    rank.ahead.close()
    for session in rank.engine.sessions:
        again = [place_of(request) for request in session.asked if request in before]
        assert again == sorted(again)
        before |= set(session.asked)
        num_again += len(again)
    assert num_again == 5 * 2 * 16


def test_tokens_that_are_prefilled_again_are_counted_without_those_that_a_server_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each request's input, three tokens are in the cache: a response that was interrupted has several."""
    expected, counted, seen = list[int](), list[int](), set[str]()

    class Cached(SteppedSession):
        async def ask(self, request: Request, params: SamplingParams) -> Sample:
            found, before = await super().ask(request, params), num_tokens_before(request)
            if found.tokens.numel() == before:
                return found
            if request.id in seen:
                expected.append(len(input_tokens(request)) - 3)
            seen.add(request.id)
            return replace(found, num_cached_tokens=found.num_cached_tokens + 3)

    @contextlib.asynccontextmanager
    async def session(self: SteppedEngine, *, may_be_held: bool = True) -> AsyncIterator[SteppedSession]:
        self.sessions.append(Cached(self))
        yield self.sessions[-1]

    monkeypatch.setattr(SteppedEngine, "session", session)
    rank = Rank(StalenessBound(2, 2, 2), Peer(0, Meeting(1)), longest=10**6)
    counted_by_sampler = rank.sampler.count
    monkeypatch.setattr(
        rank.sampler,
        "count",
        lambda **added: (counted.append(added.get("num_prefilled_again", 0)), counted_by_sampler(**added)),
    )
    for version in range(5):
        rank.push(version, 9)
        wait_until(lambda: rank.engine.sessions[-1].num_tokens >= 20, 60)
    rank.ahead.close()
    assert sum(counted) == sum(expected) and len(expected) > 2


def test_an_open_group_is_as_old_as_its_oldest_token() -> None:
    """Whether it is whole or interrupted, and from version 0 on."""
    engine, num_compared = SteppedEngine(delays=Delays(most_tokens=30)), 0
    rank = Rank(StalenessBound(4, 3, 4), Peer(0, Meeting(1)), engine=engine)
    for version in range(4):
        rank.push(version, 9)
        wait_until(lambda: engine.sessions[-1].num_tokens == 30, 60)
        with rank.ahead.pause(version, 9):
            for group in rank.producer.state.groups:
                found = rank.producer._open[group.place].group  # pyright: ignore[reportPrivateUsage]
                sampled = [] if found is None else found.sampled
                oldest = min((span.version for each in sampled for span in each.weight_versions), default=None)
                if oldest is not None:
                    assert group.born is not None and group.born <= oldest
                    assert group.born == oldest or not group.is_whole
                    num_compared += 1
    rank.ahead.close()
    assert num_compared > 4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_run_resumed_from_its_cursor_trains_on_each_index_once(num_ranks: int) -> None:
    """A run that is stopped before its first rollout keeps the places that were to come again."""
    bound, cursor, trained, version = StalenessBound(3, 2, 3), None, list[int](), 0
    for num_rollouts in (2, 0, 1, 0, 3):

        def work(
            data_parallel: Any, cursor: Any = cursor, version: int = version, n: int = num_rollouts
        ) -> Any:
            rank = Rank(bound, data_parallel.peers, cursor)
            rank.push(version, 9)
            found = list[SampleGroup]()
            for current in range(version, version + n):
                taken = rank.ahead.next(current, current, rank.peer.all_gather, run_to_end)
                assert taken is not None
                found += taken[0]
                if current < version + n - 1:
                    rank.push(current + 1, 9)
            rank.ahead.close()
            return found, rank.ahead.cursor

        ranks = on_ranks(work, tuple(range(num_ranks)))
        trained += [place_of(group.samples[0].id) for groups, _ in ranks for group in groups]
        assert len({str(cursor) for _, cursor in ranks}) == 1
        assert num_rollouts or ranks[0][1] == cursor
        assert num_rollouts or (cursor or {}).get("again"), "places were to come again"
        cursor, version = ranks[0][1], version + num_rollouts
    top, again = PromptStream(PROMPTS, 0, shuffle=False, cursor=cursor).upcoming
    assert len(set(trained)) == len(trained) == 18
    assert sorted([*trained, *again]) == list(range(top))


@pytest.mark.parametrize("bound", [StalenessBound(4, 1), StalenessBound(4, 0)], ids=str)
def test_all_ranks_stop_if_one_rank_gets_a_signal(bound: StalenessBound) -> None:
    def work(data_parallel: Any) -> Any:
        rank = Rank(bound, data_parallel.peers)
        rank.push(0, 9)
        found = rank.ahead.next(
            0, 0, rank.peer.all_gather, lambda work: work() if rank.peer.rank != 1 else None
        )
        rank.ahead.close()
        return found

    assert on_ranks(work, (0, 1, 2)) == [None] * 3


@pytest.mark.parametrize(
    "bound", [StalenessBound(4, 1), StalenessBound(4, 0), StalenessBound(4, 0, 1.5)], ids=str
)
def test_a_producer_that_fails_ends_the_wait_of_every_rank(bound: StalenessBound) -> None:
    def work(data_parallel: Any) -> str:
        is_faulty = data_parallel.peers.rank == 1
        engine = SteppedEngine(fails=lambda rid: is_faulty and rid.endswith("+1"))
        rank = Rank(bound, data_parallel.peers, engine=engine)
        rank.push(0, 9)
        with pytest.raises(RolloutError) as raised:
            rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end)
        rank.ahead.close()
        return str(raised.value)

    messages = on_ranks(work, (0, 1))
    assert all("as the test wants it" in message for message in messages)
    assert messages[0].startswith("rank 1: RolloutError: " + ("place" if bound.max_staleness else "rollout0/"))


@pytest.mark.parametrize("over_sampling", [1.0, 1.5])
def test_rank_without_a_reachable_server_ends_all_ranks(over_sampling: float) -> None:
    class Lost(SteppedSession):
        async def ask(self, request: Request, params: SamplingParams) -> Sample:
            self.errors = {**self.errors, request.id: ServerError(f"no reply to {request.id}")}
            return give_up(request)

    class Unreachable(SteppedEngine):
        @contextlib.asynccontextmanager
        async def session(self, *, may_be_held: bool = True) -> AsyncIterator[SteppedSession]:
            yield Lost(self)

    def work(data_parallel: Any) -> BaseException:
        engine = Unreachable() if data_parallel.peers.rank == 1 else SteppedEngine()
        longest = 12 if over_sampling == 1 else 10**6  # the groups of rank 0 must not end the rollout
        bound = StalenessBound(6, 0, over_sampling)
        rank = Rank(bound, data_parallel.peers, engine=engine, longest=longest)
        rank.push(0, 9)
        with pytest.raises((RolloutError, ServerError)) as raised:
            rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end)
        rank.ahead.close()
        return raised.value

    other, own = on_ranks(work, (0, 1))
    assert isinstance(own, ServerError) and str(other).startswith("rank 1: ServerError: no reply to rollout0/")


def test_a_producer_that_fails_while_a_rollout_is_trained_on_ends_all_ranks_after_the_push() -> None:
    """Its rank enters the collectives of the push like the others, and `next` raises its error."""
    broken = list[bool]()
    rank = Rank(
        StalenessBound(2, 2, 3), Peer(0, Meeting(1)), engine=SteppedEngine(fails=lambda rid: bool(broken))
    )
    rank.push(0, 9)
    assert rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end) is not None
    broken.append(True)
    rank.push(1, 8)  # open requests are sent again
    wait_until(lambda: rank.sampler.fault is not None, 120)
    pushed = list[int]()
    with rank.ahead.pause(2, 7):
        pushed.append(2)
    assert pushed == [2]
    reports = list[Any]()

    def all_gather(report: Any) -> list[Any]:
        reports.append(report)
        return [report]

    with pytest.raises(RolloutError, match="as the test wants it"):
        rank.ahead.next(2, 2, all_gather, run_to_end)
    assert len(reports) == 1 and reports[0].fault.endswith("as the test wants it")
    rank.ahead.close()
    assert rank.engine.num_open == 0


def test_fault_is_raised_after_the_other_ranks_received_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes between report and gathering is of the next round: no rank leaves the others there."""
    rank, heard = Rank(StalenessBound(4, 1), Peer(0, Meeting(1))), list[str | None]()

    def all_gather(report: Any) -> list[Any]:
        heard.append(report.fault)
        rank.sampler.fault = RolloutError("as the test wants it")
        return [report]

    monkeypatch.setattr(StalenessBound, "choose", lambda *_: None)
    rank.push(0, 9)
    with pytest.raises(RolloutError, match="as the test wants it"):
        rank.ahead.next(0, 0, all_gather, run_to_end)
    rank.ahead.close()
    assert heard == [None, "RolloutError: as the test wants it"]


class Ending(SteppedSession):
    """Ends responses of some places without a token, after a push at the earliest; `how` they end."""

    def __init__(self, engine: SteppedEngine, how: str) -> None:
        super().__init__(engine)
        self._how = how
        self.errors = self._given_up = dict[str, RolloutError]()

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        if self.is_held or place_of(request.id) % 4:
            return await super().ask(request, params)
        if self._how == "given up":
            self._given_up[request.id] = RolloutError("as the test wants it")
            return give_up(request)
        return replace(give_up(request), finish_reason="stop")


@pytest.mark.parametrize("how", ["given up", "empty"])
@pytest.mark.parametrize(
    ("bound", "num_ranks"), [(StalenessBound(4, 1), 1), (StalenessBound(3, 2, 3), 2)], ids=str
)
def test_groups_that_end_without_a_token_are_dropped_and_counted(
    how: str, bound: StalenessBound, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.asynccontextmanager
    async def session(self: SteppedEngine, *, may_be_held: bool = True) -> AsyncIterator[SteppedSession]:
        yield Ending(self, how)

    monkeypatch.setattr(SteppedEngine, "session", session)
    ranks = run_ranks(bound, num_ranks, range(2, 11))
    counts = [counts for taken, _ in ranks for _, counts in taken]
    trained = [place_of(group.samples[0].id) for taken, _ in ranks for groups, _ in taken for group in groups]
    reason = "aborted" if how == "given up" else "empty_response"
    num_dropped = sum(count.num_dropped[reason] for count in counts)
    assert num_dropped == 2 * sum(count.num_dropped_groups for count in counts) > 6
    assert all(place % 4 for place in trained)
    assert len(trained) + num_dropped / 2 == 9 * bound.prompts_per_rollout
    assert sum(count.num_samples for count in counts) == 2 * 9 * bound.prompts_per_rollout


def test_error_if_all_prompts_are_too_long() -> None:
    rank = Rank(StalenessBound(2, 1), Peer(0, Meeting(1)), prompts=[replace(p, text=TOO_LONG) for p in PROMPTS])
    rank.push(0, 9)
    with pytest.raises(RolloutError, match=r"40 of 40 .*data\.max_prompt_tokens"):
        rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end)
    rank.ahead.close()


def test_a_wait_that_nothing_can_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StalenessBound, "choose", lambda *_: None)
    rank = Rank(StalenessBound(2, 1, 2), Peer(0, Meeting(1)))
    rank.push(3, 9)
    with pytest.raises(RolloutError, match=r"rollout 3: .* 4 open groups"):
        rank.ahead.next(3, 3, rank.peer.all_gather, run_to_end)
    rank.ahead.close()


def test_a_task_that_was_cancelled_ends_the_wait() -> None:
    rank = Rank(StalenessBound(2, 1), Peer(0, Meeting(1)), longest=10**6)
    rank.push(0, 9)

    async def cancel() -> None:
        tasks = rank.sampler._tasks  # pyright: ignore[reportPrivateUsage]
        assert next(task for task in tasks if not task.done()).cancel()  # one that is done may still be here

    rank.ahead._call(cancel())  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RolloutError, match="found a cancelled response"):
        rank.ahead.next(0, 0, rank.peer.all_gather, run_to_end)
    rank.ahead.close()


@pytest.mark.parametrize("off", [-2, 1])
def test_a_sample_beyond_the_bound_or_of_weights_to_come_is_never_trained_on(off: int) -> None:
    """The versions of the sample's tokens decide, not the bookkeeping of its group."""

    class Others(SteppedEngine):
        @property
        def weight_version(self) -> int:
            return self.weights.version + off

    rank = Rank(StalenessBound(2, 1), Peer(0, Meeting(1)), engine=Others())
    rank.push(7, 9)
    with pytest.raises(RolloutError, match=f"weights {7 + off}, .* weights 7"):
        rank.ahead.next(7, 7, rank.peer.all_gather, run_to_end)
    rank.ahead.close()
