"""Rewards in processes of their own: one that hangs, dies or eats memory costs a sample, never the run."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.types import FinishReason, Prompt

RewardFaultKind = Literal["reward_failed", "reward_timed_out", "reward_out_of_memory"]

_CHUNK = 16  # samples that a worker is sent at once
_START_TIMEOUT_S = 120.0  # importing a user's module may import much else


@dataclass(frozen=True)
class RewardRequest:
    """One response to score."""

    prompt: Prompt
    response: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class RewardFault:
    """Why a response has no score."""

    kind: RewardFaultKind
    message: str


class RewardPool:
    """Worker processes that score responses, for the life of a run; they start with the first request."""

    def __init__(self, name: str, *, num_workers: int, timeout_s: float, memory_mb: int) -> None:
        """Say what to run.

        Args:
            name: Of the reward, as in `data.reward`.
            num_workers: Processes.
            timeout_s: Seconds that one response may take.
            memory_mb: What a worker may allocate besides what importing the reward took; 0 is no limit.
        """
        self._name, self._timeout_s, self._memory_mb = name, timeout_s, memory_mb
        self._workers: list[_Worker | None] = [None] * num_workers
        self._is_abandoned = threading.Event()

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Score all, in order. What happens to one response does not touch the others.

        Raises:
            RewardError: The reward cannot be loaded.
        """
        results: list[RewardResult | RewardFault | None] = [None] * len(requests)
        lines = [json.dumps(asdict(request)).encode() + b"\n" for request in requests]
        starts = deque(range(0, len(requests), _CHUNK))

        def serve(slot: int) -> None:
            while starts and not self._is_abandoned.is_set():
                try:
                    start = starts.popleft()
                except IndexError:
                    return  # another thread was faster
                end = min(start + _CHUNK, len(requests))
                for index, result in zip(range(start, end), self._scored(slot, lines[start:end]), strict=False):
                    results[index] = result

        self._is_abandoned.clear()
        slots = range(min(len(self._workers), len(starts)))
        with ThreadPoolExecutor(max(len(slots), 1), thread_name_prefix="reward") as threads:
            try:
                for served in [threads.submit(serve, slot) for slot in slots]:
                    served.result()
            except BaseException:  # a signal, or a reward that cannot be loaded: leave nobody waiting
                self._is_abandoned.set()
                self.close()
                raise
        return [result for result in results if result is not None]

    def close(self) -> None:
        """End the workers; the next `score` starts new ones."""
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                worker.end()
                self._workers[slot] = None

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _scored(self, slot: int, lines: Sequence[bytes]) -> Iterator[RewardResult | RewardFault]:
        """A result for each line, with as many workers as it takes."""
        done = 0
        while done < len(lines) and not self._is_abandoned.is_set():
            worker = self._workers[slot]
            if worker is None:
                worker = self._workers[slot] = _Worker(self._name, self._memory_mb)
            try:
                for reply in worker.replies(lines[done:], self._timeout_s):
                    done += 1
                    yield reply
            except _LostError as lost:
                worker.end()
                self._workers[slot] = None
                done += 1
                yield RewardFault(lost.kind, str(lost))


class _LostError(Exception):
    """A worker did not answer."""

    def __init__(self, kind: RewardFaultKind, message: str) -> None:
        super().__init__(message)
        self.kind: RewardFaultKind = kind


class _Worker:
    """One process of `rewards/worker.py`, and the pipes to it."""

    def __init__(self, name: str, memory_mb: int) -> None:
        """Start it, and wait until it has loaded the reward.

        Raises:
            RewardError: It could not.
        """
        command = [sys.executable, "-m", "megatron_dppo.rewards.worker", name, str(memory_mb)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._unread = b""
        try:
            (hello,) = self._exchange([b""], _START_TIMEOUT_S)
        except _LostError as lost:
            self.end()
            raise RewardError(
                f"data.reward = {name!r}: its worker did not start ({lost}). What it wrote stands above; run "
                f"python -c 'import megatron_dppo.rewards as r; r.reward({name!r})' to see it alone."
            ) from lost
        if "fault" in hello:
            self.end()
            raise RewardError(hello["fault"])

    def replies(self, lines: Sequence[bytes], timeout_s: float) -> Iterator[RewardResult | RewardFault]:
        """The worker's answers, in order.

        Raises:
            _LostError: It gave none to the next line, in time or at all.
        """
        for reply in self._exchange(lines, timeout_s):
            if "fault" in reply:
                yield RewardFault(reply["fault"], reply["message"])
            else:
                yield RewardResult(reply["value"], reply["info"])

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def _exchange(self, lines: Sequence[bytes], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Write the lines and read as many replies, both at once: either pipe may be full."""
        unsent, num_waiting = memoryview(b"".join(lines)), len(lines)
        deadline = time.monotonic() + timeout_s
        while num_waiting:
            waiting_to_write = [self._in] if unsent else []
            left = max(deadline - time.monotonic(), 0)
            readable, writable, _ = select.select([self._out], waiting_to_write, [], left)
            if not readable and not writable:
                raise _LostError("reward_timed_out", f"no answer within {timeout_s:g} s")
            if writable:
                unsent = self._sent(unsent)
            if readable:
                data = os.read(self._out, 1 << 16)
                if not data:
                    raise _LostError("reward_failed", f"the reward's process {self._how_it_ended()}")
                *complete, self._unread = (self._unread + data).split(b"\n")
                num_waiting -= len(complete)
                deadline = time.monotonic() + timeout_s
                yield from (json.loads(line) for line in complete)

    def _sent(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._in, unsent[: 1 << 16]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            return unsent[:0]  # reading says how it ended

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended itself with status {code}"
