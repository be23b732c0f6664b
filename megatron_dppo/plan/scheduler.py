"""Simulates SGLang's scheduler: which requests it admits to its cache, and retracts from a full one.

A server admits a request if its cache has room for the prompt, for the request's further tokens, and for a
share of the further tokens of all running requests. The share falls while nothing is retracted, so a server
admits more than it can hold if responses are long. If the cache is full, the requests with the fewest sampled
tokens return to the queue, and are computed again later. Left out: prefixes that requests share, pages of
several tokens, and the overlap of scheduling with the GPU.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

CHUNK_TOKENS = 8192
"""SGLang's default of chunked_prefill_size on a GPU of 80 GB."""


@dataclass(frozen=True)
class Policy:
    """Constants of SGLang's scheduler; a test compares them with the installed version's.

    Attributes:
        initial_ratio: Share of the further tokens that is reserved at first, times schedule_conservativeness.
        lowest_factor: Lowest share, relative to the first.
        decay_steps: Decode steps in which the share falls from the first to the lowest.
        most_new_tokens: Largest number of further tokens of a request that admission counts.
        retract_steps: Decode steps that the share covers after a retraction.
    """

    initial_ratio: float = 0.7
    lowest_factor: float = 0.14
    decay_steps: int = 600
    most_new_tokens: int = 4096
    retract_steps: int = 20


@dataclass(frozen=True)
class Server:
    """Limits of one server."""

    cached_tokens: int
    max_running: int
    max_new_tokens: int  # of a response; max_response_tokens of the run
    chunk_tokens: int = CHUNK_TOKENS  # prompt tokens of one prefill
    conservativeness: float = 1.0
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True)
class Served:
    """Result of a simulation of N requests."""

    num_retractions: np.ndarray  # [N] int64, of each request
    num_decode_steps: int

    @property
    def share(self) -> float:
        """Share of the requests that were retracted at least once."""
        return float((self.num_retractions > 0).mean())


class _Scheduler:
    """State of a server between two batches; a request is an index into `prompts` and `lengths`."""

    def __init__(self, server: Server, prompts: np.ndarray, lengths: np.ndarray) -> None:
        self.server, self.prompts, self.lengths = server, prompts, lengths
        policy = server.policy
        self.ratio = min(policy.initial_ratio * server.conservativeness, 1.0)
        self.lowest = self.ratio * policy.lowest_factor
        self.decay = (self.ratio - self.lowest) / policy.decay_steps
        self.sampled = np.zeros(len(lengths), np.int64)
        self.num_retractions = np.zeros(len(lengths), np.int64)
        self.waiting = deque(range(len(lengths)))
        self.running = np.zeros(0, np.int64)
        self.chunked: tuple[int, int] | None = None  # a request, and its tokens that are computed already
        self.used, self.num_steps = 0, 0
        self.is_full = False

    @property
    def free(self) -> int:
        return self.server.cached_tokens - self.used

    def prefill(self) -> bool:
        """Admit requests for one prefill, and compute them; return False if none was admitted."""
        if (self.is_full or not self.waiting) and self.chunked is None:
            return False
        server, most_new = self.server, self.server.policy.most_new_tokens
        further = np.minimum(server.max_new_tokens - self.sampled[self.running], most_new)
        left = self.free - float(further.sum()) * self.ratio  # tokens that nothing is reserved for
        chunk, ended, is_first = server.chunk_tokens, list[int](), True
        if self.chunked is not None:
            index, done = self.chunked
            num_tokens = self._num_tokens(index) - done
            extent = min(num_tokens, min(chunk, int(left)) if left >= 1 else chunk)
            self._compute(index, done, extent, ended)
            left -= extent + 1 + (min(server.max_new_tokens, most_new) if extent == num_tokens else 0)
            chunk, is_first = chunk - extent, False
        while self.waiting and chunk > 0 and self.chunked is None:
            if len(self.running) + len(ended) >= server.max_running:
                self.is_full = True
                break
            index = self.waiting[0]
            num_tokens = self._num_tokens(index)
            reserved = min(server.max_new_tokens - int(self.sampled[index]), most_new)
            if num_tokens + reserved + 1 >= left:
                self.is_full = not is_first or len(self.running) > 0
                break
            self.waiting.popleft()
            extent, is_first = min(num_tokens, chunk), False
            self._compute(index, 0, extent, ended)
            left -= extent + 1 + (min(server.max_new_tokens, most_new) if extent == num_tokens else 0)
            chunk -= extent
            if left <= 0:
                self.is_full = True
                break
        self._end(np.append(self.running, ended).astype(np.int64))
        return not is_first

    def _num_tokens(self, index: int) -> int:
        return int(self.prompts[index] + self.sampled[index])

    def _compute(self, index: int, done: int, extent: int, ended: list[int]) -> None:
        """Compute `extent` tokens of a request after its first `done`; the last one samples a token."""
        self.used += extent
        self.chunked = (index, done + extent)
        if done + extent == self._num_tokens(index):
            self.chunked = None
            self.sampled[index] += 1
            ended.append(index)

    def decode(self) -> None:
        """Sample as many tokens of each running request as fit before a request ends or the cache is full."""
        count = len(self.running)
        if self.free < count:
            self._retract()
            count, num_steps = len(self.running), 1
        else:
            left = int((self.lengths[self.running] - self.sampled[self.running]).min())
            num_steps = min(left, self.free // count)
            self.ratio = max(self.ratio - num_steps * self.decay, self.lowest)
        self.sampled[self.running] += num_steps
        self.used += num_steps * count
        self.num_steps += num_steps
        self._end(self.running)

    def _retract(self) -> None:
        """Return requests with the fewest sampled tokens to the queue, until each other one has room."""
        running = self.running
        order = np.lexsort((np.arange(len(running)), self.prompts[running], -self.sampled[running]))
        held = (self.prompts + self.sampled - 1)[running[order]]
        free, keep = self.free, len(order)
        while keep > 1 and (keep == len(order) or free < keep):
            keep -= 1
            free += int(held[keep])
        retracted = running[order[keep:]][::-1]
        self.used, self.running = self.server.cached_tokens - free, running[order[:keep]]
        self.waiting.extend(retracted.tolist())
        self.num_retractions[retracted] += 1
        sampled = int(self.sampled[self.running].sum()) + self.server.policy.retract_steps * keep
        self.ratio = min(1.0, sampled / (keep * self.server.max_new_tokens + 1))
        self.is_full = False

    def _end(self, running: np.ndarray) -> None:
        """Remove the requests that have all their tokens."""
        has_ended = self.sampled[running] >= self.lengths[running]
        if has_ended.any():
            ended = running[has_ended]
            self.used -= int((self.prompts[ended] + self.sampled[ended] - 1).sum())
            self.is_full = False
        self.running = running[~has_ended]


def simulate(server: Server, prompts: np.ndarray, lengths: np.ndarray) -> Served:
    """Serve requests that all wait from the beginning.

    Args:
        server: Limits; its cache holds the longest prompt with `max_new_tokens`.
        prompts: [N] int64 prompt tokens of each request.
        lengths: [N] int64 response tokens of each request, from 1 to `max_new_tokens`.
    """
    longest = int(prompts.max()) + server.max_new_tokens
    assert server.cached_tokens > longest + 1, "a cache that holds each request alone"
    scheduler = _Scheduler(server, prompts, lengths)
    while scheduler.waiting or len(scheduler.running) or scheduler.chunked is not None:
        if not scheduler.prefill():
            scheduler.decode()
    return Served(scheduler.num_retractions, scheduler.num_steps)
