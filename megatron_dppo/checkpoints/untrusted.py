"""Checks untrusted checkpoints: a pickle is read as plain data, or refused.

Megatron's distributed checkpoints contain pickles in three places: `.metadata`, `common.pt` (if an older
version wrote them), and the objects (not the tensors) inside `*.distcp`. The libraries load the first and the
last without restriction. A checkpoint that passes this check runs no code there: `metadata_pickle.py` has read
`.metadata`, and torch's own restricted unpickler has accepted the bytes of the others. Nobody else may change
the folder between this check and the load.
"""

import errno
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch

from megatron_dppo.checkpoints.metadata_pickle import (
    ForbiddenError,
    NewerTorchError,
    StoredBytes,
    StoredMetadata,
    StoredPlace,
    TensorEntry,
    TensorKey,
    read_metadata,
)
from megatron_dppo.errors import CheckpointError
from megatron_dppo.runtime.files import ABSENT, read_patiently, unreadable

_BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
# Older versions write this file; newer ones store an object instead.
_COMMON_FILE = {"common_backend": "torch", "common_backend_version": 1}


def refuse_code(folder: Path) -> None:
    """Refuse a distributed checkpoint if a pickle contains more than plain data, without reading tensors."""
    is_common_a_file = _require_backends(folder / "metadata.json")
    metadata = _read_metadata(folder / ".metadata")
    common = folder / "common.pt"
    if is_common_a_file or common.exists():  # Megatron reads the file if it exists
        _require_data(common, _read(common), "a pickle")
    for name, file, place in _objects(folder, metadata):
        content = _read(file, place.offset, place.length)
        _require_data(file, content, f"object {name[:200]!a} with a pickle")


def _require_backends(file: Path) -> bool:
    """Return whether `common.pt` belongs to the folder; refuse storage backends that are not checked here."""
    try:
        found = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise _torn(file, error) from error
    if found not in (_BACKENDS, _BACKENDS | _COMMON_FILE):
        raise _refusal(file, str(found)[:300], str(_BACKENDS))
    return found != _BACKENDS


def _read_metadata(file: Path) -> StoredMetadata:
    content = _read(file)
    try:
        return read_metadata(content)
    except ForbiddenError as error:
        raise _refusal(file, f"a pickle with {error}") from error
    except NewerTorchError as error:
        raise CheckpointError(
            f"{file}: found {error}, which torch 2.15 and later write; expected a checkpoint that torch "
            f"{torch.__version__} reads. Resume with torch 2.15, or convert there: megatron-dppo convert to-hf."
        ) from error
    except Exception as error:  # a damaged pickle may make the unpickler raise anything
        raise _torn(file, error) from error


def _objects(folder: Path, metadata: StoredMetadata) -> Iterator[tuple[str, Path, StoredPlace]]:
    """Yield name, file and position of each stored object, after checking the positions of all items."""
    kinds, places = metadata.state_dict_metadata, metadata.storage_data
    source = folder / ".metadata"
    for name, kind in kinds.items():
        is_item = type(kind) is StoredBytes or (type(kind) is TensorEntry and kind.is_filled)
        if type(name) is not str or not is_item:
            raise _refusal(source, f"an item {str(name)[:200]!a} that is neither tensor nor object")
    sizes: dict[str, int] = {}
    for key, place in places.items():
        is_place = type(place) is StoredPlace and place.is_filled
        if type(key) is not TensorKey or key.fqn not in kinds or not is_place:
            raise _refusal(source, "a stored item without a name or a place")
        file = folder / place.relative_path
        if place.relative_path not in sizes:
            sizes[place.relative_path] = _size_inside(folder, place.relative_path)
        if place.offset + place.length > sizes[place.relative_path]:
            raise _torn(file, EOFError(f"it ends before {key.fqn[:200]!a}"))
        if type(kinds[key.fqn]) is StoredBytes:
            yield key.fqn, file, place


def _size_inside(folder: Path, name: str) -> int:
    """Return the size of a file in bytes; the file must be in the folder, and not only linked from it."""
    file = folder / name
    try:
        is_inside = Path(name).name == name and file.resolve().parent == folder.resolve()
        is_file = file.is_file()
    except (ValueError, RuntimeError):  # a null byte, a circle of links
        is_inside = is_file = False
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise unreadable(file, error) from error
        is_inside = is_file = False
    if not is_inside:
        found = f"a path out of the folder, {name[:200]!a}"
        raise _refusal(folder / ".metadata", found, "files of the folder itself, and no links")
    if not is_file:
        raise _torn(file, FileNotFoundError("no such file"))
    return file.stat().st_size


def _read(file: Path, offset: int = 0, length: int = -1) -> bytes:
    def read() -> bytes:
        with file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)

    try:
        return read_patiently(file, read)
    except ABSENT as error:
        raise _torn(file, error) from error


def _require_data(file: Path, content: bytes, what: str) -> None:
    try:
        with _no_added_classes():
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may make torch raise anything
        text = str(error)
        named = re.search(r"GLOBAL \S+|Unsupported operand \d+|TorchScript|(?:Can only|Trying to) [^\n]*", text)
        if named is not None and (isinstance(error, UnpicklingError) or "weights_only" in text):
            found = f"{what} of more than data ({named[0][:200]!a})"
            raise _refusal(file, found) from error
        raise _torn(file, error) from error


@contextmanager
def _no_added_classes() -> Iterator[None]:
    """Restrict `weights_only` to torch's own classes; our checkpoints need no other.

    Megatron's import adds classes to the list, including numpy's, which torch itself does not trust.
    """
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)


def _refusal(
    file: Path, found: str, expected: str = "plain data, since loading anything else could run code"
) -> CheckpointError:
    return CheckpointError(
        f"{file}: found {found}; expected {expected}. Convert the checkpoint again from safetensors with "
        "megatron-dppo convert, on a machine you trust."
    )


def _torn(file: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return CheckpointError(
        f"{file} cannot be loaded: torn or missing ({reason!r}). Name another checkpoint, or make it again."
    )
