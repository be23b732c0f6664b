"""Checkpoints from elsewhere: pickles are read as data or not at all.

Megatron's distributed checkpoints hold pickles in three places: `.metadata`, `common.pt`, and the objects (not
the tensors) inside `*.distcp`. The libraries load the first and the last without restriction. What passes here
names nothing but the plain classes below, and then their loading the same bytes runs no code either.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_dppo.errors import CheckpointError

_CHECKPOINT = "torch.distributed.checkpoint"
# Dataclasses, enums and a table look-up: constructing them does nothing else.
_ALLOWED = frozenset(
    {
        *((f"{_CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((f"{_CHECKPOINT}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
        *((f"{_CHECKPOINT}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
        *((f"{_CHECKPOINT}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType")),
        (f"{_CHECKPOINT}.planner", "TensorWriteData"),
        *((f"{_CHECKPOINT}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
)
# What pickle and torch raise on bytes that are no pickle, or half of one.
_TORN = (
    *(pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, KeyError, IndexError),
    *(TypeError, AttributeError, ImportError),
)


class _ForbiddenError(Exception):
    """A pickle names something that is no plain data."""


class _DataUnpickler(pickle.Unpickler):
    """Resolves the classes of `_ALLOWED` and torch's dtypes, and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise _ForbiddenError(f"{module_name}.{global_name}")


def refuse_code(folder: Path) -> None:
    """Go on only with a distributed checkpoint whose pickles are plain data; reads no tensor.

    Args:
        folder: With `.metadata`, `common.pt` and `*.distcp` files.

    Raises:
        CheckpointError: A pickle names code, a file is torn or missing, or a path leads out of the folder.
    """
    metadata = _read_metadata(folder / ".metadata")
    _require_data(folder / "common.pt", (folder / "common.pt").read_bytes, "common.pt")
    for name, file, offset, length in _objects(folder, metadata):
        _require_data(file, lambda f=file, o=offset, n=length: _slice(f, o, n), f"object {name!r}")


def _read_metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            metadata: Any = _DataUnpickler(stream).load()
    except _ForbiddenError as error:
        raise _refusal(file, f"a pickle that names {error}") from error
    except _TORN as error:
        raise _torn(file, error) from error
    if not isinstance(metadata, Metadata):
        raise _refusal(file, f"a pickled {type(metadata).__name__}")
    return metadata


def _objects(folder: Path, metadata: Metadata) -> Iterator[tuple[str, Path, int, int]]:
    """(name, file, offset, length) of each stored object; checks every path on the way."""
    try:
        for index, info in metadata.storage_data.items():
            file = folder / info.relative_path
            if file.resolve().parent != folder.resolve():
                raise _refusal(folder / ".metadata", f"a path out of the folder, {info.relative_path!r}")
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                yield index.fqn, file, int(info.offset), int(info.length)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _torn(folder / ".metadata", error) from error


def _slice(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)


def _require_data(file: Path, read: Any, what: str) -> None:
    try:
        torch.load(io.BytesIO(read()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            reason = str(error).split("Please file")[0].splitlines()
            raise _refusal(
                file, f"{what} with a pickle of more than data ({' '.join(reason)[:300]})"
            ) from error
        raise _torn(file, error) from error
    except _TORN as error:
        raise _torn(file, error) from error


def _refusal(file: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: found {found}; expected plain data, since loading that could run code. Make the checkpoint "
        "again from safetensors with tools/convert_checkpoint.py, or get it from somebody you trust."
    )


def _torn(file: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return CheckpointError(
        f"{file} cannot be loaded: torn or missing ({reason}). Name another checkpoint, or make it again."
    )
