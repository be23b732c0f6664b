"""Options of the distributed tests, and what most runs train on."""

import json
import math
from pathlib import Path

import pytest

from tests.support.sanity_run import make_task


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-layouts`: write the measured errors into megatron_dppo/actor/LAYOUTS.md."""
    parser.addoption("--write-layouts", action="store_true", help="write the table of layouts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest first: `--dist loadfile` ends with one of them on one core otherwise."""
    seconds = json.loads((Path(__file__).parents[1] / "coverage_map.json").read_text("utf-8"))["files"]
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], math.inf))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the sanity task's tokenizer, and prompts."""
    return make_task(tmp_path_factory.mktemp("task"))
