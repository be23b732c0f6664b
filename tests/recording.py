"""Records what passed with which versions: make test RECORD=1, or -p tests.recording --record-versions.

Each file of a suite that a run was given is recorded whole; what other runs with the same versions recorded of
other files stays. `python -m tools.versions` makes a table of it.
"""

import os
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.runtime.libraries import installed_versions
from tools.versions import SUITES, Outcome, record, versions_of

_KINDS = {"passed": "passed", "failed": "failed", "skipped": "left_out"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-versions", action="store_true", help="Record the outcome in tests/versions.jsonl."
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--record-versions"):
        return
    if hasattr(config, "workerinput"):  # of xdist: reports reach the process that started it, and no more
        config.pluginmanager.register(Worker(config))
        return
    if config.option.keyword or any("::" in argument for argument in config.args):
        raise pytest.UsageError(
            "--record-versions: found a selection within files (-k, or ::); expected whole files. Leave it out."
        )
    config.pluginmanager.register(Recorder(config.rootpath))


class Worker:
    """Sends the ids of the tests that were left out."""

    def __init__(self, config: Any) -> None:
        self._output: dict[str, Any] = config.workeroutput

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._output.setdefault("left_out", []).extend(item.nodeid for item in items)


class Recorder:
    """Counts the outcomes of each file, and writes them when it is done; under xdist, all at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counts: dict[str, Counter[str]] = {}
        self._left_out: set[str] = set()
        self._num_to_come = Counter[str]()  # tests of each file

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._num_to_come.update(_file(item.nodeid) for item in session.items)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        file = _file(nodeid)
        self._num_to_come[file] -= 1
        if self._num_to_come[file] == 0:
            self._write([file])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._count(report.nodeid, _KINDS[report.outcome])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid.endswith(".py"):
            self._count(report.nodeid, "failed")

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._left_out |= {item.nodeid for item in items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._left_out |= set(getattr(node, "workeroutput", {}).get("left_out", ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            left_out = map(_file, self._left_out)
            self._write({name for name in (*self._counts, *left_out) if self._num_to_come[name] <= 0})

    def _write(self, names: Iterable[str]) -> None:
        left_out, today = Counter(map(_file, self._left_out)), datetime.now(UTC).date().isoformat()
        for suite in SUITES:
            files: dict[str, Outcome] = {}
            for name in names:
                counts = self._counts.get(name, Counter[str]())
                if Path(name).parts[:2] == ("tests", suite):
                    of_all = counts["left_out"] + left_out[name]
                    files[Path(name).name] = Outcome(counts["passed"], counts["failed"], of_all)
            if files:
                record(self._root, suite, _versions(suite), files, today)

    def _count(self, nodeid: str, kind: str) -> None:
        self._counts.setdefault(_file(nodeid), Counter())[kind] += 1


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _versions(suite: str) -> dict[str, str | None]:
    servers: dict[str, str] = {}
    if suite == "sglang":
        python = os.environ.get("SERVERS_PYTHON", str(Path(".venv-sglang/bin/python").absolute()))
        found = versions_of(python, ("sglang", "torch", "transformers"))
        servers = {name if name == "sglang" else f"server {name}": version for name, version in found.items()}
    return installed_versions() | servers
