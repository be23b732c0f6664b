"""The built-in environments: a single turn, a small sudoku, and the tasks of Gem (extra `gem`)."""

import importlib
import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from megatron_dppo.environments.base import Maker, Observation, Turn, append_to_prompt, register
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.types import FinishReason, Prompt

T = TypeVar("T")


@register("single_turn")
class SingleTurn:
    """Shows the prompt, and ends with the first response, which `data.reward` scores; an `Environment`."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """See `Environment.reset`."""
        return Observation(prompt.text, prompt.messages)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """See `Environment.step`."""
        return Turn(None, None, done=True)


_SIZE, _BLOCK = 4, 2  # of the sudoku
_MAX_EMPTY = 3  # with more, a puzzle may have several solutions


@register("sudoku")
class Sudoku:
    """Shows the board, and asks for the digit of one empty cell per turn; implements `Environment`.

    `1 2 3 4 / 3 ? 1 2 / 2 1 . 3 / 4 3 2 1` asks for the cell in the second row. Only the first word of a
    response counts. Then the board shows the correct digit, and asks for the next cell. With N empty cells,
    each correct digit earns 1 / N. `prompt.answer` is N, and the board is appended to the prompt.
    """

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """See `Environment.reset`.

        Raises:
            ConfigError: `prompt.answer` is not a valid number of cells.
        """
        if prompt.answer not in map(str, range(1, _MAX_EMPTY + 1)):
            action = "Correct the answer column."
            raise ConfigError(Problem(f"prompt {prompt.id}", repr(prompt.answer), f"1 to {_MAX_EMPTY}", action))
        generator = random.Random(seed)
        self._solution = solved_board(generator)
        self._empty = sorted(generator.sample(range(_SIZE * _SIZE), int(prompt.answer)))
        self._share = 1 / len(self._empty)
        return append_to_prompt(prompt, self._board())

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """See `Environment.step`."""
        digit = self._solution[self._empty.pop(0)]
        is_right = response.split()[:1] == [digit]
        observation = self._board() if self._empty else None
        return Turn(observation, self._share * is_right, done=not self._empty)

    def _board(self) -> str:
        cells = list(self._solution)
        for place in self._empty:
            cells[place] = "."
        cells[self._empty[0]] = "?"
        return " / ".join(" ".join(cells[row : row + _SIZE]) for row in range(0, _SIZE * _SIZE, _SIZE))


def solved_board(generator: random.Random) -> list[str]:
    """Return the digits of a board row by row, each once in every row, column and block."""

    def shuffled() -> list[int]:
        """Return the row or column numbers in random order, with the lines of a block next to each other."""
        blocks = [[block * _BLOCK + line for line in range(_BLOCK)] for block in range(_BLOCK)]
        for block in blocks:
            generator.shuffle(block)
        generator.shuffle(blocks)
        return [line for block in blocks for line in block]

    digits = [str(digit) for digit in range(1, _SIZE + 1)]
    generator.shuffle(digits)
    rows, columns = shuffled(), shuffled()
    places = [(_BLOCK * (row % _BLOCK) + row // _BLOCK + column) % _SIZE for row in rows for column in columns]
    return [digits[place] for place in places]


class GemEnvironment:
    r"""A task of Gem, for example `rollout.environment = "gem:rg:arc_1d"`; implements `Environment`.

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
        return append_to_prompt(prompt, _text(observation, info))

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
