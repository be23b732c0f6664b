"""Rewards in real worker processes: whatever one of them does costs one sample."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import RewardFault, RewardPool, RewardRequest, RewardResult
from megatron_dppo.types import Prompt

PROMPT = Prompt("p", "4", "test", text="2 * 2 =")
NAME = "bad_rewards:told"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find modules where the trainer's working directory or PYTHONPATH has them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def pool() -> Iterator[RewardPool]:
    with RewardPool(NAME, num_workers=1, timeout_s=1.0, memory_mb=512) as pool:
        yield pool


def ask(*responses: str) -> list[RewardRequest]:
    return [RewardRequest(PROMPT, response, "stop") for response in responses]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "megatron_dppo.rewards.worker" in child.cmdline()]


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        ("raise", "reward_failed", "prompt p: the reward raised KeyError: 'lost'"),
        ("sleep", "reward_timed_out", "no answer within 1 s"),
        ("spin", "reward_timed_out", "no answer within 1 s"),
        ("memory", "reward_out_of_memory", "prompt p: the reward ran out of memory"),
        ("exit", "reward_failed", "ended itself with status 3"),
        ("leave", "reward_failed", "ended itself with status 4"),
        ("crash", "reward_failed", "was ended by SIGSEGV"),
        ("nan", "reward_failed", "expected finite numbers"),
        ("type", "reward_failed", "AttributeError"),
        ("none", "reward_failed", "AttributeError"),
    ],
)
def test_a_fault_costs_its_own_sample_and_no_other(
    pool: RewardPool, response: str, kind: str, words: str
) -> None:
    results = pool.score(ask("a", response, "bcd", "ef"))
    assert [r.value if isinstance(r, RewardResult) else None for r in results] == [1.0, None, 3.0, 2.0]
    fault = results[1]
    assert isinstance(fault, RewardFault) and fault.kind == kind and words in fault.message


def test_results_come_in_order_from_any_number_of_workers() -> None:
    responses = ["x" * n for n in range(100)]
    responses[37] = responses[90] = "exit"
    expected: list[float | None] = [float(n) for n in range(100)]
    expected[37] = expected[90] = None
    for num_workers in (1, 3):
        with RewardPool(NAME, num_workers=num_workers, timeout_s=5, memory_mb=0) as pool:
            results = pool.score(ask(*responses))
            assert [r.value if isinstance(r, RewardResult) else None for r in results] == expected
            assert len(children()) == num_workers
    assert children() == []


def test_everything_reaches_the_reward(pool: RewardPool) -> None:
    (result,) = pool.score([RewardRequest(PROMPT, "é\n\u2028", "length")])
    assert result == RewardResult(3.0, {"has_prompt": 1.0, "is_cut": 1.0})
    assert pool.score([]) == []


def test_printing_disturbs_nobody(pool: RewardPool) -> None:
    results = pool.score(ask("print", "a", "print"))
    assert [r.value for r in results if isinstance(r, RewardResult)] == [5.0, 1.0, 5.0]


def test_long_responses_fit_through_the_pipes() -> None:
    with RewardPool(NAME, num_workers=1, timeout_s=20, memory_mb=0) as pool:
        results = pool.score(ask(*["y" * (1 << 20)] * 20))
        assert [r.value for r in results if isinstance(r, RewardResult)] == [float(1 << 20)] * 20


def test_a_worker_is_kept_from_one_rollout_to_the_next(pool: RewardPool) -> None:
    first, second = (pool.score(ask("pid"))[0] for _ in range(2))
    assert first == second
    assert isinstance(first, RewardResult) and first.value != os.getpid()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad_rewards:nothing", "no function 'nothing'"),
        ("no_such_module:told", "No module named 'no_such_module'"),
        ("broken_reward:told", "raised RuntimeError when imported: no licence"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_the_users_error(name: str, words: str) -> None:
    with (
        RewardPool(name, num_workers=2, timeout_s=1, memory_mb=0) as pool,
        pytest.raises(RewardError, match=words),
    ):
        pool.score(ask("a"))
    assert children() == []


def test_an_interruption_leaves_at_once_and_the_pool_usable() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardPool(NAME, num_workers=2, timeout_s=60, memory_mb=0) as pool:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                pool.score(ask(*["sleep"] * 40))
            assert time.monotonic() - started < 10
            assert children() == []
            assert pool.score(ask("a")) == [RewardResult(1.0, {"has_prompt": 1.0, "is_cut": 0.0})]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_hung_reward_does_not_outlive_a_killed_trainer() -> None:
    program = f"""
from megatron_dppo.rewards import RewardPool, RewardRequest
from megatron_dppo.types import Prompt
pool = RewardPool({NAME!r}, num_workers=1, timeout_s=60, memory_mb=0)
pool.score([RewardRequest(Prompt("p", "", "", text="x"), "a", "stop")])
print("ready", flush=True)
pool.score([RewardRequest(Prompt("p", "", "", text="x"), "spin", "stop")])
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    (worker,) = psutil.Process(trainer.pid).children()
    time.sleep(0.3)
    trainer.kill()
    trainer.wait()
    worker.wait(timeout=20)
