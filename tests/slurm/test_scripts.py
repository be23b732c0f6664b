"""What the scripts say to what cannot work, without a scheduler; and what every one of them asks for."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from jobs import ROOT

_ON_A_CPU = {"miniature_study", "quickstart", "sudoku"}
EXPERIMENTS = sorted({path.parent.name for path in (ROOT / "examples").glob("*/base.toml")} - _ON_A_CPU)
_SCRIPTS = sorted([*(ROOT / "examples").glob("*/*.sbatch"), *(ROOT / "examples" / "slurm").glob("*.sh")])


def run(script: str, *arguments: str, path: Path | None = None, **variables: str) -> tuple[int, str]:
    """Status and standard error of a script, outside of SLURM where the variables do not say otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"SLURM_SUBMIT_DIR": str(ROOT), **variables}
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    ended = subprocess.run(
        ["bash", str(ROOT / script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stderr


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """SLURM's commands as a job would see them: without a limit, of a cluster that keeps accounts."""
    for name, answer in {
        "squeue": "${LIMIT:-UNLIMITED}",
        "scontrol": "AccountingStorageType   = accounting_storage/slurmdbd",
    }.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{answer}"\n')
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_without_a_job_a_script_says_how_to_submit_it() -> None:
    status, said = run("examples/dense_base/train.sbatch", "dppo_binary_tv.toml")
    assert status == 2
    assert "found no SLURM job; expected to be started by one" in said
    assert "sbatch --account=NAME --time=24:00:00 examples/dense_base/train.sbatch ALGORITHM.toml" in said


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "a job without a time limit"),
        ({"LIMIT": "1-00:00:00"}, "a job without an account"),
        ({"LIMIT": "1-00:00:00", "SLURM_JOB_ACCOUNT": "us"}, "no algorithm"),
    ],
)
def test_a_job_without_time_or_account_is_explained(
    commands: Path, variables: dict[str, str], found: str
) -> None:
    status, said = run("examples/dense_base/train.sbatch", path=commands, **{"SLURM_JOB_ID": "1"} | variables)
    assert status == 2
    assert f"found {found}; expected " in said
    assert ("--account=NAME --time=24:00:00" in said) == (found != "no algorithm")


@pytest.mark.parametrize("name", ["nothing.toml", "base.toml", "../moe_base/cispo.toml"])
def test_an_unknown_algorithm_is_answered_with_those_that_exist(commands: Path, name: str) -> None:
    known = {"SLURM_JOB_ID": "1", "SLURM_JOB_ACCOUNT": "us", "LIMIT": "60"}
    for script in ("examples/moe_base/train.sbatch", "examples/moe_base/r3_compare.sbatch"):
        status, said = run(script, name, path=commands, **known)
        assert status == 2
        assert f"found {name}; expected one of cispo.toml dppo_binary_kl.toml dppo_binary_tv.toml" in said


def test_another_folder_than_the_root_is_refused(tmp_path: Path) -> None:
    status, said = run("examples/moe_base/train.sbatch", "cispo.toml", SLURM_SUBMIT_DIR=str(tmp_path))
    assert status == 2
    assert f"{tmp_path}: expected the repository. Submit in its root." in said


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 80


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_job_asks_for_the_processes_that_its_config_needs(experiment: str) -> None:
    folder = ROOT / "examples" / experiment
    header = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (folder / "train.sbatch").read_text(), re.M))
    assert header["job-name"] == experiment
    assert header.keys() >= {"signal", "requeue", "open-mode"}
    assert not header.keys() & {"account", "time", "partition"}, "those are the site's"
    parallel = tomllib.loads((folder / "base.toml").read_text())["parallel"]
    num_gpus = int(header["nodes"]) * int(header["gpus-per-node"])
    split = parallel.get("tensor", 1) * parallel.get("context", 1) * parallel.get("pipeline", 1)
    assert num_gpus % split == 0
    assert num_gpus % parallel.get("expert", 1) == 0
