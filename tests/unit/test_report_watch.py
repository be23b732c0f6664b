"""The report of runs that go on: rewritten as they write, until they end."""

import json
import os
import time
from pathlib import Path

import pytest

from megatron_dppo.analysis.report.report import is_going, watch
from megatron_dppo.errors import DataError
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.lock import LOCK, is_in_use, locked
from megatron_dppo.run_folder.reader import read_run


def _run(path: Path, num_rollouts: int = 3) -> Path:
    with RunFolder.open(path, {"run": {"num_rollouts": num_rollouts}}, resume=False) as folder:
        folder.write_rollout(0, {"reward/mean": 0.5}, num_rollouts=num_rollouts)
    return path


def _add(run: Path, rollout: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "rollout", "rollout": rollout, "reward/mean": 0.5}) + "\n")


def test_the_report_grows_with_its_runs_and_ends_with_them(tmp_path: Path) -> None:
    run, out = _run(tmp_path / "run"), tmp_path / "report.html"
    said: list[str] = []
    pages: list[bool] = []

    def wait(seconds: float) -> None:
        assert seconds == 5
        pages.append('data-refresh="5"' in out.read_text())
        if len(pages) == 1:  # a row that is being written
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"kind": "rol')
        elif len(pages) == 2:
            text = (run / "metrics.jsonl").read_text()
            (run / "metrics.jsonl").write_text(text.removesuffix('{"kind": "rol'))
            _add(run, 1)
        elif len(pages) == 4:  # nothing new in between
            _add(run, 2)

    found = watch([run], out, 5, said.append, wait)
    assert said == [
        f"wrote {out}: run 1/3",
        f"wrote {out}: run 1/3",
        f"wrote {out}: run 2/3",
        "all runs have ended",
    ]
    assert pages == [True] * 4 and "data-refresh=" not in out.read_text()
    assert found == ["The run raised no alarm and skipped no gradient step in 3 rollouts."]


def test_an_interrupt_leaves_a_page_that_stays(tmp_path: Path) -> None:
    run, out = _run(tmp_path / "run"), tmp_path / "report.html"
    said: list[str] = []

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    watch([run], out, 5, said.append, interrupt)
    assert said[-1] == "stopped watching; the runs go on" and "data-refresh=" not in out.read_text()


def test_a_run_that_stopped_early_has_ended(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    assert is_in_use(run) is None and is_going(read_run(run))
    with locked(run):
        assert is_in_use(run) and is_going(read_run(run))
    assert is_in_use(run) is False and not is_going(read_run(run))
    (run / LOCK).write_text("{}")  # killed: the lock names an owner without a heartbeat
    for silent_s, expected in ((0, True), (45, True), (80, False)):
        os.utime(run / LOCK, (0.0, time.time() - silent_s))
        assert is_in_use(run) is expected


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_a_clock_that_differs_from_the_file_servers_ends_no_run(
    ahead_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = _run(tmp_path / "run"), time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead_s)
    with locked(run):
        assert is_in_use(run) and is_going(read_run(run))
        assert not list(run.glob(".clock_*"))
    (run / LOCK).write_text("{}")
    os.utime(run / LOCK, (0.0, now - 80))
    assert is_in_use(run) is False


def test_watch_refuses_a_non_run_and_tolerates_brief_damage(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        watch([tmp_path], tmp_path / "report.html", 1, print, lambda seconds: None)
    run, good = _run(tmp_path / "run"), (tmp_path / "run" / "config.toml").read_text()
    waits = 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        (run / "config.toml").write_text("[run" if waits in (1, 2) or waits > 3 else good)

    with pytest.raises(DataError, match="not TOML"):
        watch([run], tmp_path / "report.html", 1, print, wait)
    assert waits == 6
