"""Checkpoints that carry code, or lead out of their folder, are refused, and the code does not run."""

import io
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_model

from megatron_dppo.errors import CheckpointError
from megatron_dppo.models.untrusted import refuse_code

_TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Megatron checkpoint as the tool makes it."""
    folder = tmp_path_factory.mktemp("untrusted")
    write_model(folder / "hf")
    command = [
        sys.executable,
        str(_TOOL),
        "to-megatron",
        "--hf",
        str(folder / "hf"),
        "--out",
        str(folder / "good"),
    ]
    subprocess.run(command, check=True)
    return folder / "good"


@pytest.fixture
def checkpoint(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "checkpoint")
    return tmp_path / "checkpoint" / "megatron"


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def in_metadata(folder: Path, evil: Evil) -> None:
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", evil))


def instead_of_metadata(folder: Path, evil: Evil) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(evil))


def in_common(folder: Path, evil: Evil) -> None:
    torch.save({"args": evil}, folder / "common.pt")


def in_an_object(folder: Path, evil: Evil) -> None:
    content = io.BytesIO()
    torch.save(evil, content)

    def change(metadata: Any) -> None:
        names = {
            n for n, kind in metadata.state_dict_metadata.items() if type(kind).__name__.startswith("Bytes")
        }
        index, info = next((i, info) for i, info in metadata.storage_data.items() if i.fqn in names)
        file = folder / info.relative_path
        offset = file.stat().st_size
        file.write_bytes(file.read_bytes() + content.getvalue())
        metadata.storage_data[index] = type(info)(info.relative_path, offset, len(content.getvalue()))

    change_metadata(folder, change)


@pytest.mark.parametrize("plant", [in_metadata, instead_of_metadata, in_common, in_an_object])
def test_planted_code_is_refused_and_never_runs(
    checkpoint: Path, tmp_path: Path, plant: Callable[[Path, Evil], None]
) -> None:
    refuse_code(checkpoint)
    marker = tmp_path / "it_ran"
    plant(checkpoint, Evil(marker))
    with pytest.raises(CheckpointError, match="could run code"):
        refuse_code(checkpoint)
    assert not marker.exists()


@pytest.mark.parametrize("plant", [in_metadata, in_an_object])
def test_the_tool_refuses_it_too(checkpoint: Path, tmp_path: Path, plant: Callable[[Path, Evil], None]) -> None:
    marker = tmp_path / "it_ran"
    plant(checkpoint, Evil(marker))
    command = [sys.executable, _TOOL, "to-hf", "--megatron", checkpoint.parent, "--out", tmp_path / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "could run code" in done.stderr and "Traceback" not in done.stderr
    assert not marker.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["../../secret", "/etc/hostname", "sub/__0_0.distcp"])
def test_a_path_out_of_the_folder_is_refused(checkpoint: Path, path: str) -> None:
    def change(metadata: Any) -> None:
        index, info = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = type(info)(path, info.offset, info.length)

    change_metadata(checkpoint, change)
    with pytest.raises(CheckpointError, match="a path out of the folder"):
        refuse_code(checkpoint)


def test_a_link_out_of_the_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.rename(tmp_path / file.name)
    file.symlink_to(tmp_path / file.name)
    with pytest.raises(CheckpointError, match="a path out of the folder"):
        refuse_code(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_torn_file_is_refused(checkpoint: Path, name: str, keep: int) -> None:
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="torn or missing"):
        refuse_code(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointError, match="torn or missing"):
        refuse_code(checkpoint)
