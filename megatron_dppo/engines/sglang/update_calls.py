"""Builds the calls that pause an SGLang server and update its weights, for each server version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_dppo.errors import ServerError


@dataclass(frozen=True)
class Call:
    """One POST request."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class TensorList:
    """Names, shapes and dtype of tensors that are stored one after another in one buffer."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str  # torch's name: "bfloat16"


class UpdateCalls:
    """Update calls of SGLang 0.5.21 to 0.5.23.

    Updates by tensor and through a process group need `begin` before them and `end` after them; updates from
    disk do not. The prefix cache of older weights survives an update unless it is flushed. A flush while
    requests run ends a server of 0.5.21, and fails the call in later versions. So servers are paused first, and
    only the last part of an update flushes.
    """

    pause = Call("/pause_generation", {"mode": "abort"})
    go_on = Call("/continue_generation", {"torch_empty_cache": False})
    begin = Call("/begin_weight_update", {"selector": "target"})
    end = Call("/end_weight_update", {})

    def from_disk(self, folder: str, version: int) -> Call:
        """Load the weights of a Hugging Face folder, also into a server that started without weights."""
        body = {
            "model_path": folder,
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": True,
        }
        return Call("/update_weights_from_disk", body)

    def join(self, group: str, host: str, port: int, backend: str, *, first_rank: int, num_ranks: int) -> Call:
        """Join a process group; rank 0 waits at host:port, and the server's ranks start at `first_rank`."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": num_ranks,
            "group_name": group,
            "backend": backend,
        }
        return Call("/init_weights_update_group", body)

    def leave(self, group: str) -> Call:
        """Leave a process group."""
        return Call("/destroy_weights_update_group", {"group_name": group})

    def from_group(self, group: str, tensors: TensorList, version: int | None) -> Call:
        """Receive one buffer that rank 0 of the group broadcasts; only the last buffer has a `version`."""
        body = {
            "names": list(tensors.names),
            "dtypes": [tensors.dtype] * len(tensors.names),
            "shapes": [list(shape) for shape in tensors.shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        return Call("/update_weights_from_distributed", body | _last(version))

    def from_tensors(self, pickles: Sequence[str], version: int | None) -> Call:
        """Load one bucket through handles: for each server rank, a pickle of the flat tensor and its parts."""
        body = {"serialized_named_tensors": list(pickles), "load_format": "flattened_bucket"}
        return Call("/update_weights_from_tensor", body | _last(version))

    def release(self, *what: str) -> Call:
        """Free the memory of "weights" or "kv_cache"; the server must be idle."""
        return Call("/release_memory_occupation", {"tags": list(what)})

    def resume(self, *what: str) -> Call:
        """Allocate the memory of "weights" or "kv_cache" again; its earlier contents are lost."""
        return Call("/resume_memory_occupation", {"tags": list(what)})


def _last(version: int | None) -> dict[str, Any]:
    """Return the fields that mark the last call of a weight version, or no last call for None."""
    return {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": str(version)}


UPDATE_CALLS: Mapping[str, UpdateCalls] = MappingProxyType(
    dict.fromkeys(("0.5.21", "0.5.22", "0.5.23"), UpdateCalls())
)
"""Update calls by the version that a server reports."""


def update_calls_of(version: str) -> UpdateCalls:
    """Return the update calls for servers of this version.

    Raises:
        ServerError: The update calls were never run against this version.
    """
    if version not in UPDATE_CALLS:
        raise ServerError(
            f"found an SGLang server of version {version!r}; expected one of {', '.join(UPDATE_CALLS)}, with "
            "tested weight updates. Install one of them for sglang.python (make sglang-venv)."
        )
    return UPDATE_CALLS[version]
