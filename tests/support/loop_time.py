"""The clock of an event loop, which a test sets forward to end a time limit without a wait."""

import asyncio


def skip(seconds: float) -> None:
    """Set the clock of the running event loop forward."""
    loop = asyncio.get_running_loop()
    time = loop.time
    setattr(loop, "time", lambda: time() + seconds)  # noqa: B010 - a method, of this loop alone
