"""Event loops of other threads and of the caller: no task is left running."""

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Callable

import pytest

from megatron_dppo.runtime.concurrency import CallerLoop, LoopThread


class StoppedError(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("make", [lambda: LoopThread("test"), CallerLoop], ids=["thread", "caller"])
def test_an_interrupted_call_leaves_no_task(
    make: Callable[[], LoopThread | CallerLoop], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the one that was called nor those that it started; each may clean up."""
    ended = list[str]()

    def stop(number: int, frame: object) -> None:
        raise StoppedError

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def called() -> None:
        other = asyncio.create_task(wait("other"))
        await asyncio.sleep(0)
        threading.Timer(
            0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        ).start()
        await asyncio.gather(other, wait("called"))

    before = signal.signal(signal.SIGALRM, stop)
    loop = make()
    try:
        with caplog.at_level(logging.ERROR, "asyncio"):
            with pytest.raises(StoppedError):
                loop.call(called(), 300)
            loop.close(300)
            gc.collect()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sorted(ended) == ["called", "other"]
    assert not caplog.records


def test_a_thread_that_ends_cancels_what_was_left() -> None:
    tasks, ended = list["asyncio.Task[None]"](), threading.Event()

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def begin() -> None:
        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0)

    loop = LoopThread("test")
    loop.call(begin(), 300)
    loop.close(300)
    assert ended.is_set() and tasks[0].cancelled() and not loop.has_started
