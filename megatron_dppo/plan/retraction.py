"""Estimates the share of responses that a run's SGLang servers retract, and the settings that help.

A retracted response loses its place in a full cache, and the server computes it again later. `simulate` repeats
SGLang's scheduler. A server admits a request if its cache has room for the prompt, for the request's further
tokens, and for a share of the further tokens of all running requests. The share falls while nothing is
retracted, so a server admits more than it can hold if responses are long. If the cache is full, the requests
with the fewest sampled tokens return to the queue. Left out: prefixes that requests share, pages of several
tokens, and the overlap of scheduling with the GPU.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_dppo.architectures.layout import is_admitted
from megatron_dppo.architectures.parameters import ModelShape, model_shape
from megatron_dppo.checks import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import num_over_sampled
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.job import ASSUMED_GPU_BYTES, Machine
from megatron_dppo.plan.memory import server_memory
from megatron_dppo.plan.units import format_count, require_number, with_settings

CHUNK_TOKENS = 8192
"""SGLang's default of chunked_prefill_size on a GPU of 80 GB."""
SIGMA = 0.8
"""Standard deviation of the logarithm of a response's length; an assumption."""
MEAN_SHARES = (0.25, 0.5)
"""Mean lengths of responses that are assumed if none is given, relative to `max_response_tokens`."""
PROMPT_SHARE = 0.25
"""Length of a prompt, relative to `max_prompt_tokens`; an assumption."""
VISIBLE = 0.01
"""Share of retracted responses from which on a run is warned of."""
_DEFAULT_RUNNING = (2048, 4096)  # bounds of SGLang's default of max_running_requests
_CONTEXTS = 512  # requests of full length by which that default counts the cache
_SIZES = (1, 2, 4, 8)  # of tp_size, in advice
_CLEARLY = 1.2  # factor of the cache of a request from which on another tp_size is advised


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


def response_lengths(count: int, mean: float, longest: int) -> np.ndarray:
    """Return [count] int64 lengths: lognormal with `SIGMA`, cut at `longest`, with this mean after the cut."""
    factors = np.exp(SIGMA * np.random.default_rng(0).normal(size=count))
    low, high = 0.0, float(longest) / factors.min()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * factors, longest).mean() < mean else (low, middle)
    return np.clip(np.rint(high * factors), 1, longest).astype(np.int64)


@dataclass(frozen=True)
class Retraction:
    """Load of one server of a run, and the responses that it is expected to retract.

    Attributes:
        server: Limits of the server.
        num_servers: Number of servers that share the rollout.
        num_requests: Number of requests of a rollout at this server; more than run at once wait.
        shares: Share of responses that are retracted at least once, by their mean length in tokens.
        is_separate: Whether the number of servers is assumed, because they have separate GPUs.
        mean: Mean length of the responses, if one was given.
    """

    server: Server
    num_servers: int
    num_requests: int
    shares: Mapping[int, float]
    is_separate: bool
    mean: float | None = None

    @property
    def num_open(self) -> int:
        """Number of requests that run at once."""
        return min(self.server.max_running, self.num_requests)

    @property
    def tokens_per_request(self) -> int:
        """Tokens of the cache for each request that runs."""
        return self.server.cached_tokens // self.num_open

    @property
    def expected(self) -> float:
        """Share at the given mean length, or at the shortest assumed one."""
        return next(iter(self.shares.values()))


def plan_retraction(
    config: Config, shape: ModelShape, machine: Machine, response_tokens: float | None = None
) -> Retraction | None:
    """Simulate one server of a run; None without SGLang, or if its cache is unknown or holds no sequence.

    Args:
        config: Config of the run.
        shape: The model's parameters.
        machine: GPUs of the trainer. Servers with separate GPUs are assumed to have as many.
        response_tokens: Mean length of a response; None tries `MEAN_SHARES` of the longest.

    Raises:
        ConfigError: An option of [sglang] that the cache or the scheduler depends on has an invalid value.
    """
    rollout, options = config.rollout, config.rollout.sglang
    is_known = config.sglang.get("device") != "cpu" or "max_total_tokens" in config.sglang
    if rollout.engine != "sglang" or not is_known:
        return None
    memory, longest = server_memory(config, shape, machine), rollout.max_response_tokens
    num_servers = options.num_own_servers or machine.num_gpus // memory.num_gpus
    if not num_servers or memory.cached_tokens <= config.data.max_prompt_tokens + longest + 2:
        return None
    server = _server(config, shape, memory.cached_tokens, machine.num_gpus)
    num_groups = num_over_sampled(rollout.over_sampling, rollout.prompts_per_rollout)
    count = num_groups * rollout.samples_per_prompt
    num_requests = max(-(-count // num_servers), 1)
    means = [min(response_tokens, longest)] if response_tokens else [share * longest for share in MEAN_SHARES]
    shares = {round(mean): _share(config, server, num_requests, mean) for mean in means}
    is_separate = not (options.colocated or options.num_own_servers)
    return Retraction(server, num_servers, num_requests, shares, is_separate, response_tokens)


def _server(config: Config, shape: ModelShape, cached_tokens: int, num_processes: int) -> Server:
    context = _number(config, "context_length", shape.sizes.max_position_embeddings)
    low, high = _DEFAULT_RUNNING
    running = _number(config, "max_running_requests", max(min(cached_tokens * _CONTEXTS // context, high), low))
    in_flight = config.rollout.sglang.max_concurrent_requests * num_processes
    has_chunks = config.sglang.get("chunked_prefill_size") != -1
    return Server(
        cached_tokens,
        max(min(running, cached_tokens // 2, in_flight), 1),
        config.rollout.max_response_tokens,
        _number(config, "chunked_prefill_size", CHUNK_TOKENS) if has_chunks else cached_tokens,
        _number(config, "schedule_conservativeness", 1.0),
    )


def _number(config: Config, key: str, default: Any) -> Any:
    value = config.sglang.get(key, default)
    require_number(f"sglang.{key}", value, "a number above 0")
    return value


def _share(config: Config, server: Server, num_requests: int, mean: float) -> float:
    lengths = response_lengths(num_requests, mean, server.max_new_tokens)
    prompts = np.full(num_requests, max(round(PROMPT_SHARE * config.data.max_prompt_tokens), 1))
    return simulate(server, prompts, lengths).share


def lines_of(found: Retraction) -> Iterator[str]:
    """Yield lines about the cache of a server and the responses that it is expected to retract."""
    requests, tokens = format_count(found.num_requests, "request"), found.tokens_per_request
    yield f"A server gets {requests} and runs {found.num_open} at once, with {tokens} tokens of cache for each."
    shares = ", ".join(f"{share:.1%} at a mean of {mean} tokens" for mean, share in found.shares.items())
    yield f"Share of responses that a full cache retracts at least once: {shares}."
    servers = format_count(found.num_servers, "server")
    where = f"{servers} on as many GPUs as the trainer's" if found.is_separate else servers
    source = "as given" if found.mean else "assumed (--assume response_tokens=3000 sets it)"
    yield f"Simulated for {where}: lengths lognormal, sigma {SIGMA:g}, cut at the limit; the mean is {source}."


def retraction_remarks(config: Config, facts: Facts) -> list[str]:
    """Return a note with the key that helps, if a visible share of responses is expected to be retracted."""
    model, num_gpus = facts.model, facts.world_size
    if isinstance(model, Problem) or not is_admitted(config.parallel, num_gpus, facts.model_sizes):
        return []
    shape, machine = model_shape(model), Machine(num_gpus, ASSUMED_GPU_BYTES)
    try:
        found = plan_retraction(config, shape, machine)
    except ConfigError:  # of an option of [sglang], about which a rule is
        return []
    if found is None or found.expected <= min(VISIBLE, config.rollout.max_dropped_fraction):
        return []
    mean = next(iter(found.shares))
    gpus = f"{format_count(num_gpus, 'GPU')} of {ASSUMED_GPU_BYTES / 1e9:g} GB"
    return [
        f"SGLang is expected to retract {found.expected:.0%} of the responses at least once, and to compute "
        f"them again: a server runs {found.num_open} at once, and its cache has {found.tokens_per_request} "
        f"tokens for each. Assumed: {gpus}, responses of {mean} tokens on average; plan takes both as "
        f"arguments. {_advice(config, shape, machine, found)}"
    ]


def _advice(config: Config, shape: ModelShape, machine: Machine, found: Retraction) -> str:
    """Return what to set so that nothing is retracted: GPUs of a server that hold more, and fewer requests."""
    mean, best, keys = next(iter(found.shares)), found, dict[str, int]()
    for size in _SIZES:
        other = plan_retraction(with_settings(config, {"sglang.tp_size": size}), shape, machine, mean)
        if other is not None and other.tokens_per_request > _CLEARLY * best.tokens_per_request:
            best, keys = other, {"sglang.tp_size": size}
    running, share = best.num_open, best.expected
    while share and running > 1:
        running //= 2
        share = _share(config, replace(best.server, max_running=running), best.num_requests, mean)
        keys["sglang.max_running_requests"] = running
    return f"With {' and '.join(f'{key} = {value}' for key, value in keys.items())}, none is."
