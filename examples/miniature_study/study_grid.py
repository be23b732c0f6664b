"""Read grid.toml: the runs, their folders, and the expected results."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError, Problem


@dataclass(frozen=True)
class Cell:
    """One algorithm under one setting: as many runs as there are seeds."""

    setting: str
    algorithm: str

    @classmethod
    def named(cls, name: str) -> "Cell":
        """From "setting/algorithm"."""
        setting, _, algorithm = name.partition("/")
        return cls(setting, algorithm)

    def folder(self, out: Path, seed: int) -> Path:
        """Of one of its runs."""
        return out / "runs" / self.setting / self.algorithm / f"seed_{seed}"

    def __str__(self) -> str:
        return f"{self.setting}/{self.algorithm}"


@dataclass(frozen=True)
class Block:
    """Cells that are shown together."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    against: str | None = None  # a number among the settings, by its dotted key, to draw figures against
    is_ranked: bool = False  # draw the algorithms one below another, the best above


@dataclass(frozen=True)
class Expectation:
    """That a figure of one cell is above that of another, on equal seeds."""

    text: str
    metric: str  # of `results.RunResult`
    above: Cell
    below: Cell


@dataclass(frozen=True)
class Grid:
    """The whole study."""

    algorithms: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Mapping[str, Any]]
    blocks: tuple[Block, ...]
    expectations: tuple[Expectation, ...]

    @property
    def cells(self) -> list[Cell]:
        """All, each once, in the order of the blocks."""
        return list(dict.fromkeys(cell for block in self.blocks for cell in block.cells))

    def overrides(self, cell: Cell) -> list[str]:
        """The cell's tables as arguments of `--set`; the algorithm's win."""
        tables = (self.settings[cell.setting], self.algorithms[cell.algorithm])
        return [f"{key}={_as_toml(value)}" for table in tables for key, value in _flat(table)]

    def number(self, setting: str, key: str) -> float:
        """Return a setting's value for a dotted key, or 0 if it has none."""
        return float(dict(_flat(self.settings[setting])).get(key, 0))

    def only(self, algorithms: Sequence[str], settings: Sequence[str], blocks: Sequence[str] = ()) -> "Grid":
        """The part of it that has these; an empty sequence means all.

        Raises:
            ConfigError: There is none of that name.
        """
        for option, given, known in (
            ("--algorithm", algorithms, self.algorithms),
            ("--setting", settings, self.settings),
            ("--block", blocks, [block.name for block in self.blocks]),
        ):
            if unknown := [name for name in given if name not in known]:
                expected = "one of " + ", ".join(known)
                raise ConfigError(Problem(option, ", ".join(unknown), expected, "Choose from that list."))

        def stays(cell: Cell) -> bool:
            is_asked = not algorithms or cell.algorithm in algorithms
            return is_asked and (not settings or cell.setting in settings)

        chosen = [block for block in self.blocks if not blocks or block.name in blocks]
        parts = [replace(block, cells=tuple(filter(stays, block.cells))) for block in chosen]
        cells = {cell for block in parts for cell in block.cells}
        asked = tuple(e for e in self.expectations if e.above in cells and e.below in cells)
        return Grid(self.algorithms, self.settings, tuple(block for block in parts if block.cells), asked)


def read_grid(path: Path) -> Grid:
    """Read grid.toml.

    Raises:
        ConfigError: A block or an expectation names what is not there.
    """
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    algorithms, settings = content["algorithms"], content["settings"]
    blocks = tuple(
        Block(
            name,
            of["title"],
            tuple(Cell(s, a) for s in of["settings"] for a in of["algorithms"]),
            of.get("against"),
            of.get("is_ranked", False),
        )
        for name, of in content["blocks"].items()
    )
    expectations = tuple(
        Expectation(of["text"], of["metric"], Cell.named(of["above"]), Cell.named(of["below"]))
        for of in content.get("expectations", [])
    )
    known = {cell for block in blocks for cell in block.cells}
    named = {cell for e in expectations for cell in (e.above, e.below)}
    for cell in (*known, *named):
        if cell.setting not in settings or cell.algorithm not in algorithms or cell not in known:
            expected = "a setting and an algorithm of some block"
            raise ConfigError(Problem(str(path), str(cell), expected, "Correct the name, or add it."))
    return Grid(algorithms, settings, blocks, expectations)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
