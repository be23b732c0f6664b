"""How the rows of `seam_table.py` read calls: what several of them have in common."""

import math
from collections.abc import Callable
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.rewards import RewardChoice
from tests.distributed.seams import Received, Seam, setting_of

ACTOR = "actor.actor:Actor"
BATCH = "engines.embedded.continuous_batch"
COMBINE = "kernels.linear:combine_statistics"


def given(name: str) -> Callable[[Received], Any]:
    """Read an argument, or an attribute of one: "params.temperature"."""

    def read(call: Received) -> Any:
        value: Any = call
        for part in name.split("."):
            value = getattr(value, part)
        return value

    return read


def plain(setting: str, consumer: str, argument: str, **more: Any) -> Seam:
    """A setting that arrives as it is."""
    return Seam(setting, consumer, given(argument), **more)


def is_training(call: Received) -> bool:
    return call.evaluated is None


def evaluates(name: str) -> Callable[[Received], bool]:
    return lambda call: call.evaluated == name


def called(values: list[Any]) -> bool:
    return bool(values)


def every(setting: str) -> Callable[[Config], list[int]]:
    """Indices of the rollouts N, 2N, 3N, ... (counted from 1), in which a period N acts."""

    def rollouts(config: Config) -> list[int]:
        return [n for n in range(config.run.num_rollouts) if (n + 1) % setting_of(config, setting) == 0]

    return rollouts


def learning_rates(config: Config) -> list[float]:
    """Of each gradient step: warm-up from 0, then down to min_lr at the last step."""
    options, total = config.optimizer, config.num_gradient_steps
    rates: list[float] = []
    for number in range(1, total + 1):
        if number <= options.warmup_steps:
            rates.append(options.lr * number / options.warmup_steps)
            continue
        left = 1 - (number - options.warmup_steps) / (total - options.warmup_steps)
        if options.schedule == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        rates.append(options.min_lr + left * (options.lr - options.min_lr))
    return [round(rate, 12) for rate in rates]


def worker_reward(call: Received) -> RewardChoice:
    """What a worker makes of the name on its command line."""
    return RewardChoice.read(call.name)


def group(field: str) -> Callable[[Received], Any]:
    """Read the parameter groups that a gradient step was taken with."""
    return lambda call: call.self.optimizer.param_groups[0][field]


def objective(field: str, scenario: str = "whole") -> Seam:
    return plain(f"algorithm.{field}", COMBINE, f"objective.{field}", scenario=scenario)


def sampled(setting: str, argument: str, where: Callable[[Received], bool] = is_training) -> list[Seam]:
    """The embedded engine's settings, where a request is given its tokens and where they are drawn."""
    deep = f"{BATCH}:sampling_log_probs" if argument in ("temperature", "top_p") else None
    rows = [plain(setting, f"{BATCH}:ContinuousBatch.__init__", f"params.{argument}", where=where)]
    return rows + ([plain(setting, deep, argument, where=where)] if deep else [])


def flag(call: Received, name: str) -> str:
    """What follows a flag in the command of a server."""
    command = call.result.command
    return command[command.index(name) + 1]


def metric(name: str) -> Callable[[Received], float]:
    """Read what a gradient step says of itself."""
    return lambda call: call.result.metrics.values()[name]


def rounded(values: list[float]) -> list[float]:
    return [round(value, 12) for value in values]


def routing_replay(call: Received) -> tuple[bool, bool]:
    """Whether a forward pass uses the rollout's routes, and whether it is measured how far the model agrees."""
    return call.is_replaying, call.is_measuring


def sorted_set(values: list[Any]) -> list[Any]:
    return sorted(set(values))


def size(setting: str, world_size: Callable[[], int | None], scenario: str) -> Seam:
    """A size of Megatron's groups, once the model is built."""
    return Seam(f"parallel.{setting}", f"{ACTOR}.__init__", lambda call: world_size(), scenario)
