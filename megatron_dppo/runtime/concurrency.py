"""Runs event loops in this thread or another one, and awaits coroutines without leaving any running."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
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

        Raises:
            TimeoutError: The thread does not return it in time; the coroutine is cancelled.
        """
        if not self.has_started:
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def close(self, timeout_s: float) -> None:
        """End the thread, and wait for it."""
        if self.has_started:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
