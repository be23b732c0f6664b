"""Each number of each config in examples/ is in a table that names its source, with the same value."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import EXPERIMENTS, ROOT

# The numbers of the configs in examples/, and the tables of the READMEs that give each of them a source.
#
# A table whose last column is "whose" gives sources. A number is code such as `rollout.samples_per_prompt = 8`.
# A name without a dot is a key of [algorithm]. A row with files in its first cell belongs to them, and any
# other to base.toml. The table of examples/README.md holds for each base.toml, unless its README has the key.


EXAMPLES = ROOT / "examples"
WHOSE = ("the paper", "the authors'", "Oat's", "Gem's", "Precision-RL's", "ours")
"""What a cell of the column begins with."""
BASE = "base.toml"
Numbers = dict[str, Any]  # by dotted key; a list of numbers is one value

_NUMBER = re.compile(r"`([a-z_0-9.]+) = ([^`]+)`")
_FILE = re.compile(r"`([\w.]+\.toml)`")


def numbers_of(table: Mapping[str, Any], prefix: str = "") -> Numbers:
    """Return the numbers of a TOML file by dotted key; true and false are none."""
    found: Numbers = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, each in enumerate(value):
                found |= numbers_of(each, f"{prefix}{name}.{index}.")
        elif _is_numeric(value):
            found[prefix + name] = value
    return found


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the tables of a page, as cells by row; the line below the head is left out."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in block.splitlines()]
        yield [row for index, row in enumerate(rows) if index != 1]


def sources_in(text: str) -> dict[str, Numbers]:
    """Return the numbers that the tables of a README give a source, by file.

    Raises:
        AssertionError: A row does not name a source, or a number has two.
    """
    found: dict[str, Numbers] = {}
    for head, *rows in tables(text):
        if head[-1] != "whose":
            continue
        for row in rows:
            assert row[-1].startswith(WHOSE), f"{row}: expected a source, one of {WHOSE}"
            for file in _FILE.findall(row[0]) or [BASE]:
                for name, value in _NUMBER.findall(" ".join(row)):
                    key = name if "." in name else f"algorithm.{name}"
                    of_file = found.setdefault(file, {})
                    assert key not in of_file, f"{file}: {key} has two rows"
                    of_file[key] = tomllib.loads(f"value = {value}")["value"]
    return found


SHARED = sources_in((EXAMPLES / "README.md").read_text())[BASE]
OF_FOLDERS = {name: sources_in((EXAMPLES / name / "README.md").read_text()) for name in EXPERIMENTS}
OURS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "our_numbers.toml").read_text())
"""The numbers of the examples that repeat no experiment, by path."""
FILES = sorted(path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.toml"))


def sources_of(file: Path) -> Numbers:
    """Return the numbers that a file, relative to examples/, may have."""
    if file.parent.name not in OF_FOLDERS:
        return numbers_of(OURS.get(file.as_posix(), {}))
    own = OF_FOLDERS[file.parent.name].get(file.name, {})
    return SHARED | own if file.name == BASE else own


def without_a_source(file: Path, numbers: Numbers) -> set[str]:
    """Return the keys of the numbers that no table gives, or with another value."""
    sources = sources_of(file)
    return {key for key, value in numbers.items() if key not in sources or sources[key] != value}


def read(file: Path) -> Numbers:
    return numbers_of(tomllib.loads((EXAMPLES / file).read_text()))


def changed(value: Any) -> Any:
    return [changed(each) for each in value] if isinstance(value, list) else 2 * value + 1


@pytest.mark.parametrize("file", FILES, ids=str)
def test_each_number_has_a_source(file: Path) -> None:
    advice = "give each a row in the README's table of sources (or in our_numbers.toml), or change it back"
    assert without_a_source(file, read(file)) == set(), f"examples/{file}: {advice}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_each_changed_number_is_found(file: Path) -> None:
    """And a number that is new there."""
    numbers = read(file)
    for key, value in numbers.items():
        assert without_a_source(file, numbers | {key: changed(value)}) == {key}
    assert without_a_source(file, numbers | {"optimizer.eps": 1e-6}) == {"optimizer.eps"}


@pytest.mark.parametrize("folder", OF_FOLDERS)
def test_a_readme_gives_no_number_that_its_configs_do_not_have(folder: str) -> None:
    for file, numbers in OF_FOLDERS[folder].items():
        assert numbers.keys() - read(Path(folder) / file).keys() == set(), file


def test_the_shared_table_and_our_list_give_no_number_that_no_config_has() -> None:
    bases = [read(Path(folder) / BASE).items() for folder in OF_FOLDERS]
    assert [key for key, value in SHARED.items() if not any((key, value) in base for base in bases)] == []
    assert {file for file in OURS if not (EXAMPLES / file).exists()} == set()
    for file, table in OURS.items():
        assert numbers_of(table) == read(Path(file))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("| `lr = 1` | nobody |", "expected a source"),
        ("| `lr = 1` | ours |\n| `lr = 2` | the paper |", "has two rows"),
    ],
)
def test_a_row_without_a_source_is_refused(row: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        sources_in(f"| numbers | whose |\n|---|---|\n{row}\n")


def test_rows_of_overlays_belong_to_their_files() -> None:
    text = "| overlay | numbers | whose |\n|---|---|---|\n| `a.toml`, `b.toml` | `delta = 0.2` | the paper |\n"
    assert sources_in(text) == {file: {"algorithm.delta": 0.2} for file in ("a.toml", "b.toml")}
