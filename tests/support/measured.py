"""Measures which lines a forked process runs, for the test that started it. See `tests/coverage_map.py`."""

import os
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coverage import Coverage

FOLDER = "MEASURED_TESTS"
"""Name of the environment variable with the folder of the measurements; unset if nothing is measured."""
SOURCES = ("megatron_dppo", "tools", "tests/support")
_ROOT = Path(__file__).parents[2]


def start_coverage(folder: str, context: str | None = None) -> "Coverage":
    """Start measuring this process, with results in a separate file in `folder`."""
    from coverage import Coverage  # a machine that measures nothing does without

    coverage = Coverage(
        data_file=Path(folder, "data"),
        data_suffix=True,
        config_file=False,
        concurrency="thread",
        source=[str(_ROOT / name) for name in SOURCES],
        context=context,
        messages=False,
    )
    coverage.start()
    return coverage


def measure_process() -> Callable[[], None]:
    """Measure this process for the current test, if tests are measured; return a function that ends it.

    It also ends when multiprocessing ends the process.
    """
    folder, test = os.environ.get(FOLDER), os.environ.get("PYTEST_CURRENT_TEST", "")
    if folder is None or not test:
        return lambda: None
    coverage = start_coverage(folder, test.rpartition(" ")[0])

    def end() -> None:
        coverage.stop()
        coverage.save()

    return Finalize(None, end, exitpriority=100)
