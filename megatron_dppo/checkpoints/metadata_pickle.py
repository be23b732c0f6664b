"""Reads torch's `.metadata` into stand-ins of torch's classes, so that no pickle reaches a real one.

An allow-list of the real classes is not enough: a pickle may set attributes of an allowed *class*, such as
`__setstate__`, and then have another effect when it is read again. A stand-in can only be created empty and
filled once, with its own fields. A pickle that passes with the stand-ins has the same effect on the real
classes. torch's own `weights_only` cannot replace this module: it does not read the pickle protocol in which
torch writes `.metadata`.
"""

import io
import pickle
from dataclasses import fields
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

_MAX_INT = (1 << 63) - 1
_ARE_STRIDES_KNOWN = any(field.name == "strides" for field in fields(TensorProperties))


class ForbiddenError(Exception):
    """A pickle names or calls an object that torch's metadata does not need."""


class NewerTorchError(Exception):
    """The metadata was written by a newer torch than the one that reads it."""


class _Record:
    """Replaces a dataclass; the annotations of a subclass are the fields it may have, and their types."""

    def __new__(cls, *arguments: Any) -> Any:
        if arguments:
            raise ForbiddenError(f"arguments for {cls.__name__}")
        return super().__new__(cls)

    def __init__(self) -> None:
        raise ForbiddenError(f"a call of {type(self).__name__}")

    def __setstate__(self, *state: Any) -> None:  # called without a state if the pickle names the class
        if len(state) != 1 or vars(self):
            raise ForbiddenError("a change to what is made already")
        vars(self).update(self.fields_of(state[0]))
        for name, annotation in type(self).__annotations__.items():
            found = type(vars(self).get(name))  # a missing field is None
            if annotation is not Any and found not in _types_of(annotation):
                raise ForbiddenError(f"a {found.__name__} as {type(self).__name__}.{name}")
        self.check()

    def check(self) -> None:
        """Check the values of the fields, once they are set."""

    @property
    def is_filled(self) -> bool:
        """Whether the pickle gave the record any fields."""
        return bool(vars(self))

    def fields_of(self, state: Any) -> dict[str, Any]:
        """Return the fields in the pickled state."""
        if type(state) is not dict or not state.keys() <= type(self).__annotations__.keys():
            raise ForbiddenError(f"unknown fields of {type(self).__name__}")
        return state


def _types_of(annotation: Any) -> tuple[type, ...]:
    """Return the types that a field may have exactly, without types of items."""
    if isinstance(annotation, UnionType):
        return get_args(annotation)
    return (type(None) if annotation is None else get_origin(annotation) or annotation,)


class _Value:
    """Replaces an immutable object that a call creates."""

    __slots__ = ()

    def __setstate__(self, *state: Any) -> NoReturn:
        raise ForbiddenError("a change to what is made already")


class Size(_Value, tuple[int, ...]):
    """Replaces torch.Size."""

    __slots__ = ()

    def __new__(cls, sizes: Any = ()) -> "Size":
        """Build the size from a tuple of counts."""
        if type(sizes) is not tuple or not all(type(size) is int and 0 <= size <= _MAX_INT for size in sizes):
            raise ForbiddenError("a torch.Size of other things than counts")
        return super().__new__(cls, sizes)


class _Dtype(_Value, str):
    __slots__ = ()


class _Layout(_Value, str):
    __slots__ = ()

    def __new__(cls, name: Any) -> "_Layout":
        if type(name) is not str or name != "torch.strided":
            raise ForbiddenError("a tensor that is not strided")
        return super().__new__(cls, name)


class _MemoryFormat(_Value, int):
    __slots__ = ()

    def __new__(cls, value: Any) -> "_MemoryFormat":
        if type(value) is not int or value not in range(3):
            raise ForbiddenError("an unknown memory format")
        return super().__new__(cls, value)


class _WriteItemType(_Value, int):
    __slots__ = ()

    def __new__(cls, value: Any) -> "_WriteItemType":
        if type(value) is not int or value not in range(1, 4):
            raise ForbiddenError("an unknown WriteItemType")
        return super().__new__(cls, value)


class _TensorProperties(_Record):
    state: tuple[Any, ...]

    def fields_of(self, state: Any) -> dict[str, Any]:
        kinds = (_Dtype, _Layout, bool, _MemoryFormat, bool)
        if type(state) is not tuple or tuple(map(type, state[:5])) != kinds or len(state) > 6:
            raise ForbiddenError("unknown fields of TensorProperties")
        for strides in state[5:]:  # of torch 2.15 and later
            if not _ARE_STRIDES_KNOWN:
                raise NewerTorchError("strides of tensors")
            if strides is not None:
                Size(strides)
        return {"state": state}


class TensorKey(_Record):
    """Replaces MetadataIndex: the name of a stored item, and its part."""

    fqn: str
    offset: Size | None
    index: int | None

    def __hash__(self) -> int:
        return hash((self.fqn, vars(self).get("offset")))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorKey):
            return NotImplemented
        return (self.fqn, vars(self).get("offset")) == (other.fqn, vars(other).get("offset"))


class StoredPlace(_Record):
    """Replaces _StorageInfo: an item's file, offset and length. Transforms, which change bytes, are refused."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None

    def check(self) -> None:
        """Check that the place is in a file."""
        if min(self.offset, self.length) < 0 or max(self.offset, self.length) > _MAX_INT:
            raise ForbiddenError("a place outside of any file")


class TensorEntry(_Record):
    """Replaces TensorStorageMetadata."""

    properties: _TensorProperties
    size: Size
    chunks: list[Any]


class StoredBytes(_Record):
    """Replaces BytesStorageMetadata: a pickled object."""


class _Chunk(_Record):
    offsets: Size
    sizes: Size


class _StorageMeta(_Record):
    checkpoint_id: Any
    save_id: Any
    load_id: Any
    modules: Any


class _SavePlan(_Record):
    items: Any
    storage_data: Any
    planner_data: Any
    usable: Any


class _WriteItem(_Record):
    index: Any
    type: Any
    bytes_io_data: Any
    tensor_data: Any


class _TensorWriteData(_Record):
    chunk: Any
    properties: Any
    size: Any


class StoredMetadata(_Record):
    """Replaces Metadata, with the field that Megatron adds."""

    state_dict_metadata: dict[str, Any]
    planner_data: Any
    storage_data: dict[Any, Any]
    storage_meta: _StorageMeta | None
    version: Any
    all_local_plans: Any


_TORCH = "torch.distributed.checkpoint"
_STAND_INS: dict[tuple[str, str], type] = {
    (f"{_TORCH}.metadata", "Metadata"): StoredMetadata,
    (f"{_TORCH}.metadata", "MetadataIndex"): TensorKey,
    (f"{_TORCH}.metadata", "StorageMeta"): _StorageMeta,
    (f"{_TORCH}.metadata", "TensorStorageMetadata"): TensorEntry,
    (f"{_TORCH}.metadata", "BytesStorageMetadata"): StoredBytes,
    (f"{_TORCH}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_TORCH}.metadata", "TensorProperties"): _TensorProperties,
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    (f"{_TORCH}.filesystem", "_StorageInfo"): StoredPlace,
    (f"{_TORCH}.planner", "SavePlan"): _SavePlan,
    (f"{_TORCH}.planner", "WriteItem"): _WriteItem,
    (f"{_TORCH}.planner", "WriteItemType"): _WriteItemType,
    (f"{_TORCH}.planner", "TensorWriteData"): _TensorWriteData,
    ("torch", "Size"): Size,
    ("torch.serialization", "_get_layout"): _Layout,
}


class _StandInUnpickler(pickle.Unpickler):
    """Unpickles the stand-ins and torch's dtypes, and refuses every other class."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        stand_in = _STAND_INS.get((module_name, global_name))
        if stand_in is not None:
            return stand_in
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return _Dtype(f"torch.{global_name}")
        raise ForbiddenError(f"the name {f'{module_name}.{global_name}'[:200]!a}")


def read_metadata(content: bytes) -> StoredMetadata:
    """Read a `.metadata` file as stand-ins."""
    metadata: Any = _StandInUnpickler(io.BytesIO(content)).load()
    if type(metadata) is not StoredMetadata or not metadata.is_filled:
        raise ForbiddenError(f"a {type(metadata).__name__} in the place of Metadata")
    return metadata
