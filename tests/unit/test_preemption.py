"""Signals: a flag between steps, an interruption while sampling, an end on the second."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_dppo.run import preemption
from megatron_dppo.run.preemption import EXIT_CODE, Preempted, StopRequests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_raises_the_flag_and_no_more(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_SAME_REQUEST_S", 600.0)
    before = signal.getsignal(number)
    with StopRequests().handle_signals() as requests:
        assert not requests.is_received
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # at once: the launcher forwarded the same request
        assert requests.is_received
    assert signal.getsignal(number) is before


def test_interruptible_work_is_left_at_once() -> None:
    with StopRequests().handle_signals() as requests:
        assert requests.run_unless_asked(lambda: 7) == 7

        def work() -> int:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(600)
            except Exception:  # noqa: BLE001 - the work's own handlers must not keep it
                pass
            return 7

        started = time.monotonic()
        assert requests.run_unless_asked(work) is None
        assert time.monotonic() - started < 300
        assert requests.run_unless_asked(lambda: pytest.fail("not begun")) is None


def _in_a_task_group() -> None:
    async def ends() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ends())
            await asyncio.sleep(600)

    asyncio.run(work())


def _in_a_callback() -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)

    asyncio.run(work())


def _in_a_task_that_is_not_awaited_yet() -> None:
    async def ends() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    async def work() -> None:
        task = asyncio.create_task(ends())
        await asyncio.sleep(600)
        await task

    asyncio.run(work())


def _and_cleaning_up_fails() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    finally:
        raise KeyError


@pytest.mark.parametrize(
    "work",
    [_in_a_task_group, _in_a_callback, _in_a_task_that_is_not_awaited_yet, _and_cleaning_up_fails],
)
def test_work_is_left_wherever_the_signal_comes(work: Callable[[], None]) -> None:
    with StopRequests().handle_signals() as requests:
        started = time.monotonic()
        assert requests.run_unless_asked(lambda: work() or 7) is None
        assert time.monotonic() - started < 300


def test_what_fails_by_itself_is_raised() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with StopRequests().handle_signals() as requests:
        with pytest.raises(asyncio.CancelledError):
            requests.run_unless_asked(lambda: asyncio.run(cancelled()))
        with pytest.raises(ZeroDivisionError):
            requests.run_unless_asked(lambda: 1 // 0)


def test_work_between_is_not_interrupted() -> None:
    with StopRequests().handle_signals() as requests:
        requests.run_unless_asked(lambda: 7)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.is_received


def test_a_second_signal_ends_at_once() -> None:
    program = """
import os, signal, time
from megatron_dppo.run.preemption import StopRequests
with StopRequests().handle_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGUSR1
    assert "SIGTERM: saving, then exit 75" in done.stderr


@pytest.mark.parametrize(("after_s", "codes"), [(0.7, []), (1.4, [128 + signal.SIGTERM])])
def test_a_signal_that_a_launcher_forwards_is_no_second_one(
    monkeypatch: pytest.MonkeyPatch, after_s: float, codes: list[int]
) -> None:
    ended, times = list[int](), iter((5.0, 5.0 + after_s))
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(preemption.os, "_exit", ended.append)
    requests = StopRequests()
    for _ in range(2):
        requests._on_signal(signal.SIGTERM, None)
    assert requests.is_received and ended == codes


def test_preempted_is_an_exit_with_75() -> None:
    assert Preempted().code == EXIT_CODE == 75
