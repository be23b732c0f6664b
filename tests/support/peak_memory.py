"""The largest increase of this process's memory during some work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def peak_memory(*, is_anonymous: bool = False) -> Iterator[list[int]]:
    """Yield a list with one number: the largest increase of this process's memory in the block, in bytes.

    `is_anonymous` leaves out mapped files.
    """
    process = psutil.Process()

    def resident_bytes() -> int:
        memory = process.memory_info()
        return memory.rss - (memory.shared if is_anonymous else 0)

    ended, above, before = threading.Event(), [0], resident_bytes()

    def watch() -> None:
        while not ended.wait(0.005):
            above[0] = max(above[0], resident_bytes() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield above
    finally:
        ended.set()
        thread.join()
