"""The process group: joined, and left with nothing of it alive."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dppo.errors import ConfigError
from megatron_dppo.runtime.process import Runtime, Stopwatch, start, unusable_gpus

LEAVE = """
import time
from contextlib import suppress
from pathlib import Path

from megatron_dppo.runtime import process

process.start()
import torch.distributed.checkpoint  # as commands do: Megatron is imported after the process group exists

process.stop()


def threads_of_gloo():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text())
    return [name for name in names if "gloo" in name]


deadline = time.monotonic() + 300
while threads_of_gloo() and time.monotonic() < deadline:
    time.sleep(0.1)
print(threads_of_gloo())
"""


def test_gloos_threads_end_with_the_process_group() -> None:
    """What lives on is torn down while Python exits, which now and then ends in `terminate called`, rc -6."""
    ended = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("32", "32")])
def test_collectives_of_a_layer_are_launched_before_what_hides_them(given: str | None, expected: str) -> None:
    """As Megatron asks for with sequence parallelism; CUDA reads the variable when it starts."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    environment = {key: value for key, value in os.environ.items() if key != name}
    look = f"import os; from megatron_dppo.runtime import process; process.start(); print(os.environ[{name!r}])"
    given_one = {} if given is None else {name: given}
    ended = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=600, env=environment | given_one
    )
    assert (ended.returncode, ended.stdout) == (0, f"{expected}\n"), ended.stderr


SMI = "#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 535.104.05\\nNVIDIA H100 80GB HBM3, 535.104.05\\n'\n"
NO_DRIVER = (
    "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver'; exit 9\n"
)
IN_JOB = {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("smi", "variables", "words"),
    [
        (SMI, {}, "2 GPUs (NVIDIA H100 80GB HBM3) with driver 535.104.05 and torch"),
        (SMI, {"CUDA_VISIBLE_DEVICES": "1"}, "driver 535.104.05"),
        (NO_DRIVER, IN_JOB, "4 GPUs of SLURM's job"),
        (None, IN_JOB, "4 GPUs of SLURM's job"),
        (SMI, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (None, IN_JOB | {"CUDA_VISIBLE_DEVICES": "-1"}, None),
        (NO_DRIVER, {"SLURM_GPUS_ON_NODE": "0"}, None),
        (None, {}, None),
    ],
)
def test_cpu_training_on_a_gpu_machine_needs_a_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    smi: str | None,
    variables: dict[str, str],
    words: str | None,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))
    if smi is not None:
        (tmp_path / "nvidia-smi").write_text(smi)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    problem = unusable_gpus()
    assert (problem is None) == (words is None)
    if problem is not None and words is not None:
        assert words in problem.found and "CUDA_VISIBLE_DEVICES=''" in problem.action
        with pytest.raises(ConfigError, match="the GPUs: found"):
            start()


def test_gpus_that_torch_can_use_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert unusable_gpus() is None


def test_a_phase_ends_with_its_body_unless_the_body_raises() -> None:
    runtime = Runtime(torch.device("cpu"), 0, 1)
    timer = Stopwatch(runtime)
    with timer.time("rollout"):
        with timer.time("reward"):
            assert runtime.progress.phase == "reward"
        assert runtime.progress.phase == "rollout"
    assert runtime.progress.phase == ""
    with pytest.raises(ValueError, match="wrong"), timer.time("train"):
        raise ValueError("wrong")
    assert runtime.progress.phase == "train", "the report of the error names it"
    assert timer.seconds.keys() == {"rollout", "reward", "train"}
