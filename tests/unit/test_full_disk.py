"""A full disk ends a run with one line, whichever library met it."""

import errno
import json
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

from megatron_dppo.cli.options import user_errors
from megatron_dppo.data.batches.batch_file import write_group
from megatron_dppo.errors import DiskError
from megatron_dppo.run.session import newest_checkpoint
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.files import byte_count, full_disk_explained, write_jsonl
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
    with (
        pytest.raises(DiskError) as raised,
        full_disk_explained(tmp_path, kept=lambda: newest_checkpoint(tmp_path)),
    ):
        write(tmp_path)
    said = str(raised.value)
    assert len(said.splitlines()) == 1
    assert said.startswith(f"{tmp_path}: found that a file cannot be written (")
    assert " bytes free on its disk" in said
    assert f"The newest checkpoint is {checkpoint}. Free some space" in said


def test_a_run_without_a_checkpoint_or_a_folder_is_explained_too(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with (
        pytest.raises(DiskError, match="There is no checkpoint yet"),
        full_disk_explained(run, kept=lambda: newest_checkpoint(run)),
    ):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "no"), RuntimeError("shapes differ"), json.JSONDecodeError("no", "", 0)],
)
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), full_disk_explained(tmp_path):
        raise error


@pytest.mark.parametrize("folders", [0, 2])
def test_the_message_names_the_file_or_the_folder_with_the_least_room(
    tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch, folders: int
) -> None:
    monkeypatch.setattr("megatron_dppo.runtime.files.free_bytes", lambda path: len(path.name))
    written = tmp_path / "samples.jsonl"
    places = (tmp_path / "roomy", tmp_path / "full")[:folders]
    with pytest.raises(DiskError) as raised, full_disk_explained(*places):
        write_jsonl(written, [{"response": "x" * 10_000}])
    where, free = (written, 13) if not folders else (tmp_path / "full", 4)
    assert str(raised.value).startswith(f"{where}: found that a file cannot be written (")
    assert f"'{written}'), with {free} bytes free on its disk; expected room for it. Free" in str(raised.value)


def test_any_command_ends_with_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as raised, user_errors():
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/table.json")
    assert raised.value.exit_code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("DiskError: /somewhere/table.json: found that a file")


def test_bytes_are_counted_in_units_that_leave_digits() -> None:
    assert [byte_count(n) for n in (0, 999, 220_500, 3_200_000, 61_080_000_000)] == [
        *("0 B", "999 B", "220.50 kB", "3.20 MB", "61.08 GB"),
    ]
