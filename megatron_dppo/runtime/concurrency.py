"""Runs event loops in this thread or another one, and awaits coroutines without leaving any running."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(work: Awaitable[T]) -> T:
    """Return the result of `work` in a new event loop, like `asyncio.run`.

    `asyncio.run` would format the result, including its tensors: its handler of SIGINT holds the task, and
    `signal` looks up handlers in an enum, which formats an error message for an unknown handler and discards
    it.
    """
    results: list[T] = []

    async def main() -> None:
        results.append(await work)

    asyncio.run(main())
    return results[0]


async def all_of(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return the result of each, in order; if one raises, cancel the others and wait until they have ended."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end(tasks)


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class CallerLoop:
    """An event loop in the caller's thread that runs only during `call`, with the methods of `LoopThread`."""

    def __init__(self) -> None:
        """Create the loop with the first `call`."""
        self._runner, self.has_started = asyncio.Runner(), False

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine, and return its result; `timeout_s` is ignored.

        If it raises, or a signal handler raises meanwhile, all tasks of the loop are cancelled.
        """
        self.has_started, results = True, list[T]()

        async def main() -> None:
            results.append(await work)  # see `run_loop`

        try:
            self._runner.run(main())
        except BaseException:
            with suppress(asyncio.CancelledError):  # a handler may have scheduled the cancellation of all tasks
                self._runner.run(_cancel_others())
            raise
        return results[0]

    def close(self, timeout_s: float) -> None:
        """End the loop; `timeout_s` is ignored."""
        self._runner.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class LoopThread:
    """An event loop in a separate thread, which starts with the first `call`."""

    def __init__(self, name: str) -> None:
        """Create the loop; `name` is the thread's name in a debugger."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def has_started(self) -> bool:
        """Whether `call` was called, and `close` was not."""
        return self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the thread, and return its result.

        If a signal handler raises meanwhile, the coroutine is cancelled.
        """
        if not self.has_started:
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def close(self, timeout_s: float) -> None:
        """Cancel all tasks and end the thread, and wait for it."""
        if self.has_started:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()
