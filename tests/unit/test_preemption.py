"""Signals: a flag between steps, an interruption while sampling, an end on the second."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from megatron_dppo.cli.options import user_errors
from megatron_dppo.run import preemption
from megatron_dppo.run.preemption import EXIT_CODE, Preempted, StopRequests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_raises_the_flag_and_no_more(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_SAME_REQUEST_S", 600.0)
    with handled_by(number, signal.default_int_handler), StopRequests().handle_signals() as requests:
        assert not requests.is_received
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # at once: the launcher forwarded the same request
        assert requests.is_received


@contextmanager
def handled_by(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal in the body, which must leave the handler as it was."""
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_terminal_that_is_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    with handled_by(number, signal.SIG_IGN), StopRequests().handle_signals() as requests:
        os.kill(os.getpid(), number)
        assert not requests.is_received
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.is_received


def test_a_closed_terminal_that_cannot_show_the_line_raises_the_flag() -> None:
    program = """
import os, signal, sys
from megatron_dppo.run.preemption import StopRequests
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with StopRequests().handle_signals() as requests:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGHUP)
    os._exit(0 if requests.is_received else 3)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stderr.close()
        process.stdin.close()
    assert process.returncode == 0


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


def test_errors_without_a_stop_request_propagate() -> None:
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


@pytest.mark.parametrize(
    ("first", "second"), [("SIGTERM", "SIGUSR1"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGINT")]
)
def test_a_second_signal_ends_at_once(first: str, second: str) -> None:
    program = f"""
import os, signal, time
from megatron_dppo.run.preemption import StopRequests
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler)
with StopRequests().handle_signals():
    os.kill(os.getpid(), signal.{first})
    time.sleep(1.2)
    os.kill(os.getpid(), signal.{second})
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.Signals[second]
    assert done.stderr == f"{first}: saving, then exit 75; a second signal ends at once\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_while_the_command_is_imported_ends_with_one_line(rank: str) -> None:
    """The module that is imported catches whatever is raised, as libraries do."""
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron_dppo.cli":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Finder())
from megatron_dppo.__main__ import main
main()
"""
    command, variables = [sys.executable, "-c", program], os.environ | {"RANK": rank}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    lines = {"0": "SIGINT: ended before the command began\n", "1": ""}
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", lines[rank])


def test_ctrl_c_before_training_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, user_errors():
        raise KeyboardInterrupt
    assert ended.value.exit_code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "SIGINT: ended\n"


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
