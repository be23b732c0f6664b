"""`megatron-dppo grid` trains tiny models: its runs equal `train`'s, and a second call does the rest."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.make_tiny import write_tiny
from tests.faults.campaign import compare_rows
from tests.support.experiments import ROOT
from tests.support.ranks import FORKS
from tests.support.records import metrics_of

GRPO, DPPO = "examples/moe_base/grpo_clip_higher.toml", "examples/moe_base/dppo_binary_tv.toml"
FILES = ("--variant", GRPO, "--variant", DPPO)
COMMON = ("examples/moe_base/base.toml", "examples/tiny.toml")
SETS = ("--set", "run.num_rollouts=2", "--set", "evaluation.every=0")


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
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def test_a_grid_is_its_runs_and_a_second_call_adds_what_is_new(folder: Path) -> None:
    out = folder / "study"
    status, said = finished(grid(folder, *FILES, *SETS, "--seeds", "4,0", "--jobs", "2", "-o", "study"))
    assert status == 0, said
    runs = [out / name / f"seed_{seed}" for name in ("grpo_clip_higher", "dppo_binary_tv") for seed in (4, 0)]
    assert all(len(metrics_of(run, "rollout")) == 2 for run in runs)
    first = {run: (run / "metrics.jsonl").read_bytes() for run in runs}
    numbers = json.loads((out / "numbers.json").read_text())
    assert numbers["baseline"] == "grpo_clip_higher" and "4 of 4 runs" in said
    assert [list(line["runs"]) for line in numbers["lines"]] == [["4", "0"], ["4", "0"]]

    status, said = finished(grid(folder, *FILES, *SETS, "--seeds", "4,0,1", "--jobs", "2", "-o", "study"))
    assert status == 0 and "6 of 6 runs" in said, said
    assert {run: (run / "metrics.jsonl").read_bytes() for run in runs} == first
    other = json.loads((out / "numbers.json").read_text())["lines"][1]
    assert other["label"] == "dppo_binary_tv" and other["numbers"]["reward_last"]["num_seeds"] == 3

    config = (out / "dppo_binary_tv" / "seed_1" / "config.toml").read_text()
    assert "seed = 1\n" in config and 'preset = "dppo_binary_tv"' in config
    alone = ("--set", "run.seed=4", "--set", "run.folder=alone")
    files = (*COMMON, DPPO)
    command = [sys.executable, "-m", "megatron_dppo", "train", *files, *SETS, *alone]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"})
    assert compare_rows(folder / "alone", out / "dppo_binary_tv" / "seed_4") == (0, 0)


def test_an_interrupted_grid_saves_and_goes_on(folder: Path) -> None:
    out = folder / "stopped"
    arguments = ("--set", "run.num_rollouts=30", "--set", "evaluation.every=0", "-o", out.name)
    process = grid(folder, *FILES[2:], *arguments)
    metrics = out / "dppo_binary_tv" / "seed_0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count('"rollout"')):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    status, said = finished(process)
    assert status == 75 and "the same command resumes them" in said
    num_saved = len(metrics_of(metrics.parent, "rollout"))
    assert num_saved < 30 and (metrics.parent / "checkpoints" / "latest").is_file()
    status, said = finished(grid(folder, *FILES[2:], *arguments))
    assert status == 0, said
    assert [row["rollout"] for row in metrics_of(metrics.parent, "rollout")] == list(range(30))
