"""Tests for the processes of a grid's runs."""

import subprocess
import sys
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
    """A status can be read once, and the thread that starts the next run reads the status of all ended runs."""
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


def test_fork_server_prints_nothing() -> None:
    """It shares the terminal with the progress bar."""
    code = "import sys, megatron_dppo.cli.forked; print('megatron.core.optimizer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
