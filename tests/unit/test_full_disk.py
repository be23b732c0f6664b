"""A full disk ends a run with one line, whichever library met it."""

import errno
import json
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.data.batches.kept_batches import write_group
from megatron_dppo.errors import DiskError
from megatron_dppo.run.session import full_disk_explained
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.jsonl import write_jsonl
from megatron_dppo.types import TrainBatch


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files larger than 2,000 bytes fail, in the calls and with the messages of a full disk."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def _torch(run: Path) -> None:
    torch.save(torch.zeros(10_000), run / "weights.pt")


def _torch_stream(run: Path) -> None:
    with (run / "weights.pt").open("wb") as stream:
        torch.save(torch.zeros(10_000), stream)


def _safetensors(run: Path) -> None:
    save_file({"weight": torch.zeros(10_000)}, run / "weights.safetensors")


def _batches(run: Path) -> None:
    write_group(run / "batches", 0, (0, 1), [TrainBatch((), 10**3000, 1)])


def _samples(run: Path) -> None:
    write_jsonl(run / "samples.jsonl", [{"response": "x" * 10_000}])


def _metrics(run: Path) -> None:
    with RunFolder.open(run / "new", {"run": {}}, True) as folder:
        folder.truncate(0)
        for step in range(100):
            folder.write_step(0, step, {"loss/policy": 1.0, "policy/entropy": 0.5})


@pytest.mark.parametrize("write", [_torch, _torch_stream, _safetensors, _batches, _samples, _metrics])
def test_every_writer_is_explained(tmp_path: Path, small_files: None, write: Callable[[Path], None]) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    with pytest.raises(DiskError) as raised, full_disk_explained(tmp_path):
        write(tmp_path)
    said = str(raised.value)
    assert len(said.splitlines()) == 1
    assert said.startswith(f"{tmp_path}: found that a file cannot be written (")
    assert " bytes free on its disk" in said
    assert f"The newest checkpoint is {checkpoint}. Free some space" in said


def test_a_run_without_a_checkpoint_or_a_folder_is_explained_too(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskError, match="There is no checkpoint yet"),
        full_disk_explained(tmp_path / "new" / "run"),
    ):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "no"), RuntimeError("shapes differ"), json.JSONDecodeError("no", "", 0)],
)
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), full_disk_explained(tmp_path):
        raise error
