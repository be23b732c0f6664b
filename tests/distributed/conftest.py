"""Options of the distributed tests, and what most runs train on."""

from pathlib import Path

import pytest

from tests.support.longest_first import pytest_collection_modifyitems
from tests.support.sanity_run import make_task

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "task"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-layouts`: write the measured errors into megatron_dppo/actor/LAYOUTS.md."""
    parser.addoption("--write-layouts", action="store_true", help="write the table of layouts")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the sanity task's tokenizer, and prompts."""
    return make_task(tmp_path_factory.mktemp("task"))
