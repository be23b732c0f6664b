"""Runs the tasks of Gem (extra `gem`), for example `rollout.environment = "gem:rg:arc_1d"`."""

import importlib
import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from megatron_dppo.environments.base import Maker, Observation, Turn, opened, register
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.types import FinishReason, Prompt

T = TypeVar("T")


class GemEnvironment:
    r"""A task of Gem; implements `Environment`.

    The task is appended to the prompt. The prompt should ask for the answer in `\boxed{}`: Gem reads only that,
    and not every task mentions it.
    """

    def __init__(self, gem: Any, task: str) -> None:
        self._gem, self._task = gem, task
        self._random: tuple[Any, Any] | None = None  # Gem's tasks use the global generators

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """See `Environment.reset`."""
        self._env = self._gem.make(self._task)
        observation, info = self._alone(lambda: self._env.reset(seed=seed))
        return opened(prompt, _text(observation, info))

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """See `Environment.step`."""
        observation, reward, is_over, is_cut, info = self._alone(lambda: self._env.step(response))
        return Turn(_text(observation, info), float(reward), bool(is_over or is_cut))

    def _alone(self, work: Callable[[], T]) -> T:
        """Call Gem with the random generators in the state in which this task left them."""
        if self._random is not None:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
        result = work()
        self._random = random.getstate(), np.random.get_state()
        return result


@register("gem:")
def gem_task(task: str) -> Maker:
    """Return a function that makes environments of a task.

    Raises:
        ConfigError: Gem is not installed, or has no such task.
    """
    where = "rollout.environment"
    try:
        gem: Any = importlib.import_module("gem")
        registry: Any = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        importlib.import_module("gem.envs")  # fills the registry
    except ModuleNotFoundError as error:
        expected, action = "the package gem-llm", "Install it: pip install 'megatron_dppo[gem]'."
        if sys.version_info >= (3, 12):
            action = "Use Python 3.11: gem-llm, the extra gem, refuses later ones."
        raise ConfigError(Problem(where, f"'gem:{task}', and {error}", expected, action)) from error
    if task not in registry:
        all_of_them = "python -c 'import gem; gem.print_envs()' lists them."
        action = did_you_mean(task, registry, all_of_them, "'gem:{}'".format)
        raise ConfigError(Problem(where, f"'gem:{task}'", f"one of Gem's {len(registry)} tasks", action))
    return lambda: GemEnvironment(gem, task)


def _text(observation: str, info: dict[str, Any]) -> str:
    """Return a task's observation, followed by the game state that some tasks return separately."""
    suffix = info.get("suffix", "")
    return f"{observation}\n{suffix}" if suffix else observation
