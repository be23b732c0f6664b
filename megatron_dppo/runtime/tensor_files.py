"""Writes safetensors files with the mode of other new files, because safetensors itself writes mode 0600."""

import stat
import uuid
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the mode that a new file has in its folder.

    Args:
        tensors: Contiguous tensors, by name.
        path: File to write; an existing file is replaced.
        metadata: Strings for the header.

    Raises:
        OSError, SafetensorError: The disk is full, or fails in another way.
    """
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(_mode_of_a_new_file(path.parent))


def make_readable(folder: Path) -> None:
    """Set the mode of a new file on the safetensors files that a library wrote into a folder."""
    mode = _mode_of_a_new_file(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def _mode_of_a_new_file(folder: Path) -> int:
    """Return the mode of a temporary new file: reading the umask would set it, for all threads."""
    file = folder / f".{uuid.uuid4().hex}.mode"
    file.touch(exist_ok=False)
    try:
        return stat.S_IMODE(file.stat().st_mode)
    finally:
        file.unlink()
