"""Writes safetensors files that are as readable as other files: safetensors itself writes mode 0600."""

import stat
import uuid
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the mode that a new file has in its folder.

    Args:
        tensors: By name, contiguous.
        path: The file. An existing one is replaced.
        metadata: Texts in the header.

    Raises:
        OSError, SafetensorError: The disk is full, or fails in another way.
    """
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(_mode_of_a_new_file(path.parent))


def make_readable(folder: Path) -> None:
    """Give the safetensors files that a library wrote into a folder the mode that a new file has there."""
    mode = _mode_of_a_new_file(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _mode_of_a_new_file(folder: Path) -> int:
    """Return the mode, from a file that is made and removed: a umask is read by setting it, for all threads."""
    file = folder / f".{uuid.uuid4().hex}.mode"
    file.touch(exist_ok=False)
    try:
        return stat.S_IMODE(file.stat().st_mode)
    finally:
        file.unlink()
