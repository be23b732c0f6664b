"""Fail skipped tests unless they need a GPU, give slow tests more time, hide a `make` that started pytest."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SLOW_TIMEOUT_S = 7200


def pytest_configure() -> None:
    """Drop `make`'s variables: a `make` that a test starts would print the folders that it enters."""
    for name in ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"):
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace the time limit of pyproject.toml for tests marked slow."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the report of a skip into a failure; an expected failure stays what it is."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped without the gpu marker: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole file into a failure, outside tests/gpu."""
    report = yield
    if report.skipped and (Path(__file__).parent / "gpu") not in collector.path.parents:
        report.outcome = "failed"
        report.longrepr = f"skipped as a whole: {_reason(report.longrepr)}"
    return report


def _reason(skip: object) -> str:
    return str(skip[-1]) if isinstance(skip, tuple) else str(skip)
