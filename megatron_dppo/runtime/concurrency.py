"""Runs an event loop for large results, and awaits several coroutines without leaving any running."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

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
