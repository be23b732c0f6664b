"""Rewards in real worker processes: whatever one of them does costs one sample."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import RewardFault, RewardPool, RewardRequest, RewardResult
from megatron_dppo.rewards.pool import Answers
from megatron_dppo.runtime.framing import FrameReader, frame_of
from megatron_dppo.types import Prompt
from megatron_dppo.workers.pool import WorkerPool
from megatron_dppo.workers.service import LOADED, OUT_OF_MEMORY, WorkerFault, decode, encode, read_reply
from tests.support.processes import wait_until

LIMIT_S = 300.0  # of what must not take so long
SLEEP_S = f"99999.{os.getpid()}"  # other test processes have separate sleepers
PROMPT = Prompt("p", "4", "test", text="2 * 2 =")
NAME = "tests.unit.bad_rewards:told"


@pytest.fixture(autouse=True)
def short_sleep(importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEP_S", SLEEP_S)


@pytest.fixture
def sleepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has a file for each worker in which a reward sleeps."""
    folder = tmp_path / "sleepers"
    folder.mkdir()
    monkeypatch.setenv("SLEEPERS", str(folder))
    return folder


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    with RewardPool(NAME, num_workers=1, timeout_s=LIMIT_S, memory_mb=128) as pool:
        yield pool


def ask(*responses: str) -> list[RewardRequest]:
    return [RewardRequest(PROMPT, response, "stop") for response in responses]


def alone(*responses: str) -> list[list[RewardRequest]]:
    """Requests of one response each."""
    return [[request] for request in ask(*responses)]


def scores(found: Answers | WorkerFault) -> list[float | None]:
    assert isinstance(found, list)
    return [each.value if isinstance(each, RewardResult) else None for each in found]


def values(results: list[RewardResult | RewardFault]) -> list[float | None]:
    return [result.value if isinstance(result, RewardResult) else None for result in results]


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that other tests left running, such as multiprocessing's, are none of this file's business."""
    there = frozenset(child.pid for child in psutil.Process().children(recursive=True))
    monkeypatch.setattr(sys.modules[__name__], "OTHERS", there)


OTHERS: frozenset[int] = frozenset()


def descendants() -> list[psutil.Process]:
    """This process's workers, and what they have started."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.pid not in OTHERS and not has_ended(child)]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        (
            "raise",
            "reward_failed",
            "prompt p: the reward raised KeyError: 'lost' (in _raise, bad_rewards.py line",
        ),
        ("raise nameless", "reward_failed", "_NamelessError"),
        ("leave", "reward_failed", "the reward raised SystemExit: 4"),
        ("input", "reward_failed", "the reward raised EOFError"),
        (
            "sleep",
            "reward_timed_out",
            "prompt p: found no reply within 10 s. Correct the reward, or raise data.",
        ),
        ("spin", "reward_timed_out", "no reply within 10 s"),
        ("backtrack", "reward_timed_out", "no reply within 10 s"),
        ("flood", "reward_timed_out", "no reply within 10 s"),
        ("program that hangs", "reward_timed_out", "no reply within 10 s"),
        (
            "eat",
            "reward_out_of_memory",
            "prompt p: found that 128 MiB were not enough. Correct the reward, or raise data.",
        ),
        ("exit", "reward_failed", "prompt p: its worker exited with code 3"),
        ("last words", "reward_failed", "output:\nso long"),
        ("crash", "reward_failed", "was killed by SIGSEGV"),
        ("crash", "reward_failed", "in _crash"),
        ("fork and die", "reward_failed", "exited with code 7"),
        ("close everything", "reward_failed", "closed its pipes"),
        ("nan", "reward_failed", "found {'value': nan}; expected finite numbers"),
        ("infinite info", "reward_failed", "found {'x': inf}; expected finite numbers"),
        ("huge info", "reward_failed", "expected at most 1048576"),
        ("text value", "reward_failed", "TypeError: a str for a number"),
        ("none value", "reward_failed", "TypeError: a NoneType for a number"),
        ("text", "reward_failed", "found a str; expected a number or a RewardResult"),
        ("none", "reward_failed", "found a NoneType; expected a number or a RewardResult"),
    ],
)
def test_a_fault_costs_its_own_sample_and_no_other(response: str, kind: str, words: str) -> None:
    timeout_s = 10.0 if kind == "reward_timed_out" else LIMIT_S
    with RewardPool(NAME, num_workers=1, timeout_s=timeout_s, memory_mb=128, environment=("SLEEP_S",)) as pool:
        results = pool.score(ask("a", "ab", response, "bcd", "ef"))
    assert values(results) == [1.0, 2.0, None, 3.0, 2.0]
    fault = results[2]
    assert isinstance(fault, RewardFault)
    assert fault.kind == kind
    assert words in fault.message
    assert descendants() == []
    assert all(process.info["cmdline"] != ["sleep", SLEEP_S] for process in psutil.process_iter(["cmdline"]))


def test_small_objects_fill_the_memory_too() -> None:
    with RewardPool(NAME, num_workers=1, timeout_s=LIMIT_S, memory_mb=64) as pool:
        (fault, result) = pool.score(ask("eat crumbs", "a"))
        assert isinstance(fault, RewardFault) and fault.kind == "reward_out_of_memory"
        assert values([result]) == [1.0]


def test_a_leak_costs_a_sample_now_and_then(pool: RewardPool) -> None:
    assert values(pool.score(ask(*["leak"] * 6))) == [1.0, 1.0, None, 1.0, 1.0, None]


def test_results_come_in_order_from_any_number_of_workers() -> None:
    responses = ["x" * n for n in range(100)]
    responses[37] = responses[90] = "exit"
    expected: list[float | None] = [float(n) for n in range(100)]
    expected[37] = expected[90] = None
    for num_workers in (1, 3):
        with RewardPool(NAME, num_workers=num_workers, timeout_s=LIMIT_S, memory_mb=0) as pool:
            assert values(pool.score(ask(*responses))) == expected
            assert 2 <= len(descendants()) <= 2 * num_workers
        assert descendants() == []


def test_no_more_workers_start_than_there_is_work_for() -> None:
    with RewardPool(NAME, num_workers=3, timeout_s=LIMIT_S, memory_mb=0) as pool:
        assert descendants() == [] == pool.score([])
        pool.score(ask("a"))
        assert len(descendants()) == 2  # the worker, and the process that guards it


def test_everything_reaches_the_reward(pool: RewardPool) -> None:
    (result,) = pool.score([RewardRequest(PROMPT, "é\n\u2028\ud800", "length")])
    assert result == RewardResult(4.0, {"has_prompt": 1.0, "is_cut": 1.0})


def test_requests_survive_the_way_to_a_worker() -> None:
    call: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "add", "arguments": {"x": [1, None]}}],
    }
    messages = ({"role": "user", "content": "2 * 2 = \u2028\n", "name": "me"}, call)
    rest: Any = {
        "tools": [{"name": "add"}],
        "metadata": {"a": {"b": [1.5]}},
        "label": [4],
        "file": "train.jsonl",
    }
    chat = Prompt("c", "4", "test", messages=cast(Any, messages), **rest)
    for request in (RewardRequest(chat, "a", "stop"), RewardRequest(PROMPT, "\ud800", "length")):
        (content,) = FrameReader(max_bytes=1000).feed(encode([request] * 2))
        assert decode(json.loads(content), list[RewardRequest]) == [request] * 2


@pytest.mark.parametrize("fields", [{}, {"value": "1"}, {"info": {}}, {"value": 1.0, "info": {"x": None}}])
def test_fields_of_no_score_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Expected `float`|required field `value`"):
        decode(["x", fields], Answers)


@pytest.mark.parametrize("response", ["print", "program that reads", "program that is terminated"])
def test_user_code_and_its_programs_leave_the_pipes_alone(pool: RewardPool, response: str) -> None:
    of_response = {"print": 5.0, "program that reads": 0.0, "program that is terminated": -signal.SIGTERM}[
        response
    ]
    results = pool.score(ask("a", "ab", response, "abc", "abcd"))
    assert values(results) == [1.0, 2.0, of_response, 3.0, 4.0]


def test_long_responses_fit_through_the_pipes() -> None:
    with RewardPool(NAME, num_workers=1, timeout_s=LIMIT_S, memory_mb=0) as pool:
        assert values(pool.score(ask(*["y" * (4 << 20), "z"] * 3))) == [float(4 << 20), 1.0] * 3


def test_a_worker_is_kept_from_one_rollout_to_the_next(pool: RewardPool) -> None:
    pool.start()
    (worker, child) = descendants()
    assert values(pool.score(ask("pid"))) == values(pool.score(ask("pid"))) == [float(child.pid)]
    assert descendants() == [worker, child]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "tests.unit.bad_rewards:nothing",
            "data.reward: found .*'nothing' is not there; expected a function of tests.unit.bad_rewards",
        ),
        ("tests.unit.bad_rewards:_kept", "'_kept' is no function"),
        ("no_such_module:told", "no module 'no_such_module'"),
        (
            "tests.unit.broken_reward:told",
            "cannot be imported: it raised RuntimeError: no licence(.|\n)*Traceback",
        ),
        ("aritmetic", "Did you mean 'arithmetic'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_the_users_error(name: str, words: str) -> None:
    with RewardPool(name, num_workers=2, timeout_s=1, memory_mb=0) as pool:
        with pytest.raises(RewardError, match=words):
            pool.start()
        with pytest.raises(RewardError, match=words):
            pool.score(ask("a", "b"))
        assert descendants() == []


def test_a_worker_that_dies_while_it_starts_says_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fatal.py").write_text("import os\nprint('no driver', flush=True)\nos._exit(5)\n")
    monkeypatch.chdir(tmp_path)
    pool = RewardPool("fatal:told", num_workers=1, timeout_s=1, memory_mb=0)
    with pytest.raises(RewardError, match=r"code 5(.|\n)*no driver"):
        pool.score(ask("a"))


@contextmanager
def interrupted_once(is_so: Callable[[], bool], *, wakes: bool = True) -> Iterator[None]:
    """Interrupt the block as Ctrl-C does, once something is so.

    `wakes=False`: as if the signal came just before the main thread began to wait, which it does not end then.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def watch() -> None:
        wait_until(is_so, LIMIT_S)
        receiver = threading.main_thread() if wakes else threading.current_thread()
        signal.pthread_kill(receiver.ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    watcher = threading.Thread(target=watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            watcher.start()
            yield
        watcher.join()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("wakes", [True, False])
@pytest.mark.parametrize("moment", ["at work", "starting"])
def test_an_interruption_leaves_at_once_and_the_pool_usable(
    moment: str, wakes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleepers: Path
) -> None:
    waits = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    (tmp_path / "slow.py").write_text(waits + "from tests.unit.bad_rewards import told\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "go").touch()
    with RewardPool(
        "slow:told", num_workers=2, timeout_s=LIMIT_S, memory_mb=0, environment=("SLEEPERS",)
    ) as pool:
        if moment == "at work":
            pool.score(ask("a", "b"))
        else:
            (tmp_path / "go").unlink()
        started = time.monotonic()
        so = {"at work": lambda: len([*sleepers.iterdir()]) == 2, "starting": lambda: bool(descendants())}
        with interrupted_once(so[moment], wakes=wakes):
            pool.score(ask(*["sleep"] * 40))
        assert time.monotonic() - started < LIMIT_S
        assert descendants() == []
        (tmp_path / "go").touch()
        assert values(pool.score(ask("a"))) == [1.0]


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("interrupted_number", [1, 2])
def test_an_interruption_while_requests_are_queued_leaves_none_of_them(
    interrupted_number: int, runs: bool, monkeypatch: pytest.MonkeyPatch, sleepers: Path
) -> None:
    """While a thread starts, its starter waits: a signal often comes then, and the thread may run or not."""
    number = count(1)

    class Interrupted(threading.Thread):
        def start(self) -> None:
            is_this_one = next(number) == interrupted_number
            if runs or not is_this_one:
                super().start()
            if is_this_one:
                raise KeyboardInterrupt

    with RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0, environment=("SLEEPERS",)) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("megatron_dppo.workers.pool.Thread", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.score(ask(*["sleep"] * 40))
        assert descendants() == []
        for each in sleepers.iterdir():
            each.unlink()
        with interrupted_once(lambda: len([*sleepers.iterdir()]) == 2):  # both workers are free again
            pool.score(ask("sleep", "sleep"))


@pytest.mark.parametrize("response", ["sleep", "spin", "backtrack", "program that hangs"])
def test_a_hung_reward_does_not_outlive_a_killed_trainer(response: str) -> None:
    program = f"""
from megatron_dppo.rewards import RewardPool, RewardRequest
from megatron_dppo.types import Prompt
pool = RewardPool({NAME!r}, num_workers=1, timeout_s={LIMIT_S}, memory_mb=0, environment=("SLEEP_S",))
pool.start()
print("ready", flush=True)
pool.score([RewardRequest(Prompt("p", "", "", text="x"), {response!r}, "stop")])
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    is_program = response == "program that hangs"
    wait_until(lambda: len(psutil.Process(trainer.pid).children(recursive=True)) >= 2 + is_program, LIMIT_S)
    time.sleep(0.3)  # it is busy by now
    hung = psutil.Process(trainer.pid).children(recursive=True)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: all(map(has_ended, hung)), LIMIT_S)


def test_signal_to_the_job_is_handled_by_the_trainer(pool: RewardPool) -> None:
    pool.start()
    processes = descendants()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for process in processes:
            process.send_signal(number)
    assert values(pool.score(ask("a"))) == [1.0]
    assert descendants() == processes


def test_the_worker_speaks_frames_of_json() -> None:
    requests = b"".join(
        encode({"number": number, "request": [request]}) for number, request in enumerate(ask("a", "eat"))
    )
    command = [sys.executable, "-m", "megatron_dppo.rewards.worker", NAME, "64"]
    done = subprocess.run(command, input=requests, stdout=subprocess.PIPE, check=True)
    hello, first, last = FrameReader(max_bytes=100_000).feed(done.stdout)
    files = set[tuple[str, str]]()
    assert read_reply(hello, LOADED, type(None), files) is None
    assert scores(read_reply(first, 0, Answers, files)) == [1.0]
    assert frame_of(last) == OUT_OF_MEMORY and isinstance(read_reply(last, 1, Answers, files), WorkerFault)


def test_reward_that_always_times_out_ends_the_scoring() -> None:
    with RewardPool(NAME, num_workers=2, timeout_s=0.05, memory_mb=0) as pool:
        with pytest.raises(RewardError, match=r"16 requests .*timed out"):
            pool.score(ask(*["sleep"] * 1000))
        found = values(pool.score(ask("a", "abc")))
        # None: on a busy machine
        assert len(found) == 2 and found[0] in (1.0, None) and found[1] in (3.0, None)


def test_any_number_of_threads_ask_one_pool() -> None:
    """Each thread gets its scores; a hanging reward in one costs the others none."""
    with RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0) as pool:
        (slow,), asked = pool.submit(ask("sleep")), [ask(*["a" * (k + 1)] * 20) for k in range(4)]
        with ThreadPoolExecutor(4) as threads:
            assert [values(found) for found in threads.map(pool.score, asked)] == [
                [k + 1.0] * 20 for k in range(4)
            ]
        assert not slow.done()


def test_requests_queued_after_a_hanging_one_move_to_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "_most_sent", 30)  # as if rewards had been quick so far
    with RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0) as pool:
        pool.start()  # one worker, which takes the first thirty before the other has started
        slow, *quick = pool.submit(*alone("sleep", *["a"] * 60))
        assert [scores(answer.result(LIMIT_S)) for answer in quick] == [[1.0]] * 60
        assert not slow.done()


def test_cancelled_request_frees_its_worker() -> None:
    with RewardPool(NAME, num_workers=1, timeout_s=LIMIT_S, memory_mb=0) as pool:
        slow, waiting = pool.submit(*alone("sleep", "abc"))
        assert slow.cancel()
        assert scores(waiting.result(LIMIT_S)) == [3.0]
        assert values(pool.score(ask("a"))) == [1.0]


def test_close_cancels_pending_requests() -> None:
    with RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0) as pool:
        submitted = pool.submit(*alone(*["sleep"] * 5))
        with ThreadPoolExecutor(3) as threads:
            asking = threads.submit(pool.score, ask(*["sleep"] * 3))
            while not asking.done():  # it may come after the first has closed
                for closing in [threads.submit(pool.close) for _ in range(2)]:
                    closing.result(LIMIT_S)
            with pytest.raises(CancelledError):
                asking.result()
        assert all(answer.cancelled() for answer in submitted)
        assert descendants() == []
        assert values(pool.score(ask("a"))) == [1.0]


def test_close_cancels_requests_that_come_meanwhile(monkeypatch: pytest.MonkeyPatch, sleepers: Path) -> None:
    """It comes after those that were pending were cancelled, and takes a worker."""
    cancel_all, late = WorkerPool._cancel_all, list[Any]()

    def cancel_then_ask(pool: Any) -> None:
        cancel_all(pool)
        if not late:
            late.extend(pool.submit(*alone("sleep", "sleep")))
            wait_until(lambda: len([*sleepers.iterdir()]) == 2, LIMIT_S)

    with RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0, environment=("SLEEPERS",)) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(WorkerPool, "_cancel_all", cancel_then_ask)
            pool.close()
        assert all(answer.cancelled() for answer in late) and descendants() == []
        assert values(pool.score(ask("a"))) == [1.0]


def test_requests_that_time_out_count_over_all_calls() -> None:
    with RewardPool(NAME, num_workers=1, timeout_s=0.05, memory_mb=0) as pool:
        for _ in range(15):
            (fault,) = pool.score(ask("sleep"))
            assert isinstance(fault, RewardFault) and fault.kind == "reward_timed_out"
        last, behind = pool.submit(*alone("sleep", "a"))
        with pytest.raises(RewardError, match=r"16 requests .*timed out"):
            last.result()
        with pytest.raises(RewardError, match=r"16 requests .*timed out"):
            behind.result()
        pool._timeout_s = LIMIT_S
        assert values(pool.score(ask("a"))) == [1.0]


def test_an_interruption_leaves_the_requests_of_others(sleepers: Path) -> None:
    with RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0, environment=("SLEEPERS",)) as pool:
        (other,) = pool.submit(ask("sleep"))
        with interrupted_once(lambda: len(list(sleepers.iterdir())) == 2):
            pool.score(ask(*["sleep"] * 5))
        assert not other.done() and values(pool.score(ask("a"))) == [1.0]


def test_awaited_requests_share_a_queue_and_can_be_cancelled() -> None:
    """Replies come to the loop that asked, whichever thread it runs in; a hanging request delays none."""

    async def each(pool: RewardPool, *words: str) -> list[RewardResult | RewardFault]:
        return await asyncio.gather(*map(pool.score_one, ask(*words)))

    async def give_up(pool: RewardPool) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await pool.score_one(ask("sleep")[0])

    async def close_meanwhile(pool: RewardPool) -> None:
        waiting = asyncio.create_task(pool.score_one(ask("sleep")[0]))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(pool.close)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with (
        RewardPool(NAME, num_workers=2, timeout_s=LIMIT_S, memory_mb=0) as pool,
        ThreadPoolExecutor(3) as threads,
    ):
        lists = [["a" * (n + k) for n in range(1, 40)] for k in range(2)]
        hanging = threads.submit(asyncio.run, give_up(pool))
        found = [threads.submit(asyncio.run, each(pool, *words)) for words in lists]
        assert [values(each.result()) for each in found] == [values(pool.score(ask(*words))) for words in lists]
        hanging.result()
        assert values(asyncio.run(each(pool, "aa"))) == [2.0]
        asyncio.run(close_meanwhile(pool))
    with RewardPool(NAME, num_workers=1, timeout_s=LIMIT_S, memory_mb=0) as pool:
        asyncio.run(give_up(pool))
        assert values(asyncio.run(each(pool, "abc"))) == [3.0], "the only worker is free again"
    assert descendants() == []
