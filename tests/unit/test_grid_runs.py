"""Tests for the processes of a grid's runs."""

import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from megatron_dppo.cli import grid_runs
from megatron_dppo.cli.grid_runs import GridRun, train_all


def fail_the_odd_ones(run: GridRun, devices: str | None) -> None:
    if int(run.folder.name) % 2:
        raise SystemExit(7)


def test_each_run_has_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status can be read once, and the thread that starts the next run reads those of all that have ended."""
    read = forkserver.read_signed

    def read_slowly(file: int) -> int:
        try:
            value = read(file)
        except EOFError:
            time.sleep(0.5)  # longer than who has read the status
            raise
        if value == 7:
            time.sleep(0.3)  # the other thread starts its next run meanwhile
        return value

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    monkeypatch.setattr(grid_runs, "_train", fail_the_odd_ones)
    runs = [GridRun(tmp_path / str(number), (), (), 1) for number in range(8)]
    failed = train_all(runs, 2)
    assert sorted(run.folder.name for run in failed) == ["1", "3", "5", "7"]
    printed = capsys.readouterr().err
    assert printed.count("ended with status 7;") == 4 and printed.count("ended with status") == 4
