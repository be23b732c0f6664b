"""Each number of each config in examples/ is in a table that says whose it is, and with the same value."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.numbers_and_sources import (
    BASE,
    EXAMPLES,
    FILES,
    OF_FOLDERS,
    OURS,
    SHARED,
    Numbers,
    numbers_of,
    sources_in,
    without_a_source,
)


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
