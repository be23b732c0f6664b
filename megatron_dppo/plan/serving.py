"""Compares the cache of a run's SGLang servers with the tokens of the requests that they run at once.

A server that runs more requests than its cache holds retracts some: it drops their entries and computes them
again later. On average a running request has its prompt and half of its response in the cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_dppo.architectures.parameters import ModelShape
from megatron_dppo.checks import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import num_over_sampled
from megatron_dppo.errors import ConfigError
from megatron_dppo.plan.job import Job, Machine
from megatron_dppo.plan.memory import server_memory
from megatron_dppo.plan.units import format_count, require_number

MEAN_SHARE = 0.25
"""Mean lengths of prompts and responses, relative to the longest allowed; an assumption."""
_DEFAULT_RUNNING = (2048, 4096)  # bounds of SGLang's default of max_running_requests
_CONTEXTS = 512  # requests of full length by which that default counts the cache


@dataclass(frozen=True)
class ServerLoad:
    """Load of one SGLang server of a run."""

    cached_tokens: int  # that its cache holds
    num_servers: int  # that share the rollout
    num_requests: int  # of a rollout at this server; more than run at once wait
    num_open: int  # requests that run at once
    prompt_tokens: float  # mean of a prompt; assumed
    response_tokens: float  # mean of a response
    is_separate: bool  # whether the number of servers is assumed, because they have separate GPUs
    is_assumed: bool  # whether `response_tokens` is assumed

    @property
    def tokens_per_request(self) -> int:
        """Tokens of the cache for each request that runs."""
        return self.cached_tokens // self.num_open

    @property
    def mean_tokens(self) -> float:
        """Tokens that a running request has in the cache, on average."""
        return self.prompt_tokens + self.response_tokens / 2

    @property
    def retracts(self) -> bool:
        """Whether the running requests have more tokens than the cache holds."""
        return self.num_open * self.mean_tokens > self.cached_tokens

    @property
    def advice(self) -> str:
        """What to set so that the running requests fit."""
        fitting = max(int(self.cached_tokens / self.mean_tokens), 1)
        return f"Lower sglang.max_running_requests to {fitting}, or try another sglang.tp_size."


def server_load(
    config: Config, shape: ModelShape, machine: Machine, response_tokens: float | None = None
) -> ServerLoad | None:
    """Return the load of one server; None without SGLang, or if its cache is unknown or holds no sequence.

    Args:
        config: Config of the run.
        shape: The model's parameters.
        machine: GPUs of the trainer. Servers with separate GPUs are assumed to have as many.
        response_tokens: Mean length of a response; None assumes `MEAN_SHARE` of the longest.
    """
    rollout, options = config.rollout, config.rollout.sglang
    is_known = config.sglang.get("device") != "cpu" or "max_total_tokens" in config.sglang
    if rollout.engine != "sglang" or not is_known:
        return None
    memory, longest = server_memory(config, shape, machine), rollout.max_response_tokens
    cached = memory.cached_tokens
    num_servers = options.num_own_servers or machine.num_gpus // memory.num_gpus
    if not num_servers or cached < config.data.max_prompt_tokens + longest:
        return None
    num_groups = num_over_sampled(rollout.over_sampling, rollout.prompts_per_rollout)
    num_requests = max(-(-num_groups * rollout.samples_per_prompt // num_servers), 1)
    running = _max_running(config, shape, cached)
    running = min(running, options.max_concurrent_requests * machine.num_gpus, num_requests)
    return ServerLoad(
        cached_tokens=cached,
        num_servers=num_servers,
        num_requests=num_requests,
        num_open=max(running, 1),
        prompt_tokens=MEAN_SHARE * config.data.max_prompt_tokens,
        response_tokens=min(response_tokens or MEAN_SHARE * longest, longest),
        is_separate=not (options.colocated or options.num_own_servers),
        is_assumed=response_tokens is None,
    )


def _max_running(config: Config, shape: ModelShape, cached_tokens: int) -> int:
    """Return the limit of running requests that SGLang takes or chooses."""
    context = _number(config, "context_length", shape.sizes.max_position_embeddings)
    low, high = _DEFAULT_RUNNING
    default = max(min(cached_tokens * _CONTEXTS // context, high), low)
    return min(_number(config, "max_running_requests", default), cached_tokens // 2)


def _number(config: Config, key: str, default: Any) -> Any:
    value = config.sglang.get(key, default)
    require_number(f"sglang.{key}", value, "a number above 0")
    return value


def lines_of(load: ServerLoad) -> Iterator[str]:
    """Yield lines about the cache of a server, and a warning if the running requests do not fit."""
    servers = format_count(load.num_servers, "server")
    where = f"{servers} on as many GPUs as the trainer's" if load.is_separate else servers
    requests = format_count(load.num_requests, "request")
    each = f"{load.tokens_per_request} tokens of cache for each"
    yield f"Each of {where} gets {requests} and runs {load.num_open} at once, with {each}."
    source = "assumed; see --assume response_tokens" if load.is_assumed else "as given"
    mean = f"responses of {load.response_tokens:.0f} tokens on average ({source})"
    if not load.retracts:
        yield f"That is enough for {mean}."
        return
    yield (
        f"Warning: SGLang may retract responses and compute them again. With {mean}, a running request has "
        f"{load.mean_tokens:.0f} in the cache. {load.advice}"
    )


def load_remarks(config: Config, facts: Facts) -> list[str]:
    """Return a note with the key that helps, if the requests that run at once do not fit a server's cache."""
    try:
        job = Job.assumed(config, facts)
        load = server_load(config, job.shape, job.machine)
    except ConfigError:  # of a key that has its own rule
        return []
    if load is None or not load.retracts:
        return []
    return [
        f"SGLang may retract responses and compute them again: a server runs {load.num_open} requests at once, "
        f"and its cache has {load.tokens_per_request} tokens for each. {load.advice} Assumed: "
        f"{job.machine.assumed_text}, responses of {load.response_tokens:.0f} tokens on average; plan takes "
        "both as arguments."
    ]
