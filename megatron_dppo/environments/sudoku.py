"""A small sudoku with several turns: 4 x 4 cells, one empty cell per turn."""

import random

from megatron_dppo.environments.base import Observation, Turn, opened, register
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.types import FinishReason, Prompt

SIZE, BLOCK = 4, 2
MAX_EMPTY = 3  # with more, a puzzle may have several solutions


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
        if prompt.answer not in map(str, range(1, MAX_EMPTY + 1)):
            action = "Correct the answer column."
            raise ConfigError(Problem(f"prompt {prompt.id}", repr(prompt.answer), f"1 to {MAX_EMPTY}", action))
        generator = random.Random(seed)
        self._solution = solved_board(generator)
        self._empty = sorted(generator.sample(range(SIZE * SIZE), int(prompt.answer)))
        self._share = 1 / len(self._empty)
        return opened(prompt, self._board())

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
        return " / ".join(" ".join(cells[row : row + SIZE]) for row in range(0, SIZE * SIZE, SIZE))


def solved_board(generator: random.Random) -> list[str]:
    """Return the digits of a board row by row, each once in every row, column and block."""

    def shuffled() -> list[int]:
        """Return the row or column numbers in random order, with the lines of a block next to each other."""
        blocks = [[block * BLOCK + line for line in range(BLOCK)] for block in range(BLOCK)]
        for block in blocks:
            generator.shuffle(block)
        generator.shuffle(blocks)
        return [line for block in blocks for line in block]

    digits = [str(digit) for digit in range(1, SIZE + 1)]
    generator.shuffle(digits)
    rows, columns = shuffled(), shuffled()
    places = [(BLOCK * (row % BLOCK) + row // BLOCK + column) % SIZE for row in rows for column in columns]
    return [digits[place] for place in places]
