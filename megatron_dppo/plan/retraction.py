"""Estimates the share of responses that a run's SGLang servers retract, and the settings that help.

A retracted response loses its place in a full cache, and the server computes it again later (`scheduler`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_dppo.architectures.layout import is_admitted
from megatron_dppo.architectures.parameters import ModelShape, model_shape
from megatron_dppo.checks import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.job import ASSUMED_GPU_BYTES, Machine
from megatron_dppo.plan.memory import server_memory
from megatron_dppo.plan.scheduler import CHUNK_TOKENS, Server, simulate
from megatron_dppo.plan.units import format_count, require_number, with_settings

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
    count = round(rollout.prompts_per_rollout * rollout.over_sampling) * rollout.samples_per_prompt
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
