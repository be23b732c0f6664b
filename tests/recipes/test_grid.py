"""`megatron-dppo grid` trains tiny models: an interrupted one saves, and the same command resumes it.

That its runs equal `train`'s, and that a second call trains what is new, is in `test_guides.py`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.make_tiny import write_tiny
from tests.support.experiments import ROOT
from tests.support.ranks import FORKS
from tests.support.records import metrics_of

VARIANT = ("--variant", "examples/moe_base/dppo_binary_tv.toml")
COMMON = ("examples/moe_base/base.toml", "examples/tiny.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with examples/ and the tiny models."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "examples").symlink_to(ROOT / "examples")
    process = FORKS.Process(target=write_tiny, args=(folder / "runs" / "tiny",))
    process.start()
    process.join()
    assert process.exitcode == 0
    return folder


def grid(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_dppo", "grid", *COMMON, *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=1200)
    return process.returncode, said


def test_interrupted_grid_saves_and_resumes(folder: Path) -> None:
    out = folder / "stopped"
    arguments = ("--set", "run.num_rollouts=30", "--set", "evaluation.every=0", "-o", out.name)
    process = grid(folder, *VARIANT, *arguments)
    metrics = out / "dppo_binary_tv" / "seed_0" / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while not (metrics.is_file() and metrics.read_text().count('"rollout"')):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # a shell may have made the tests ignore SIGINT
    status, said = finished(process)
    assert status == 75 and "the same command resumes them" in said
    num_saved = len(metrics_of(metrics.parent, "rollout"))
    assert num_saved < 30 and (metrics.parent / "checkpoints" / "latest").is_file()
    status, said = finished(grid(folder, *VARIANT, *arguments))
    assert status == 0, said
    assert [row["rollout"] for row in metrics_of(metrics.parent, "rollout")] == list(range(30))
