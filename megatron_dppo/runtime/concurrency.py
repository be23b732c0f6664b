"""Runs an event loop for large results; awaits several things at once, and leaves none of them behind."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


def run_loop(work: Awaitable[T]) -> T:
    """Return the result of `work` in an event loop of its own, as `asyncio.run`.

    That would format the result, tensors and all: its handler of SIGINT holds the task, and `signal` looks
    handlers up in an enum, whose error message for one that it does not know is made and thrown away.
    """
    results: list[T] = []

    async def main() -> None:
        results.append(await work)

    asyncio.run(main())
    return results[0]


async def all_of(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return the result of each, in order; where one raises, the others are cancelled and have ended first."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
