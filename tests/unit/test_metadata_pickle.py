"""torch's metadata of checkpoints as torch 2.13 and torch 2.15 write it, whichever is installed."""

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_dppo.checkpoints import metadata_pickle
from megatron_dppo.checkpoints.metadata_pickle import ForbiddenError, StoredTensor, read_metadata


def _read(patch: pytest.MonkeyPatch, after: tuple[Any, ...], *, knows_strides: bool) -> object:
    """Read the metadata of one tensor, whose properties have the five states of torch 2.13, then these."""
    patch.setattr(metadata_pickle, "_ARE_STRIDES_KNOWN", knows_strides)
    state = TensorProperties(dtype=torch.bfloat16).__getstate__()[:5]
    patch.setattr(TensorProperties, "__getstate__", lambda self: (*state, *after))
    size = torch.Size([2, 3])
    chunks = [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=size)]
    stored = TensorStorageMetadata(properties=TensorProperties(), size=size, chunks=chunks)
    content = pickle.dumps(Metadata(state_dict_metadata={"weight": stored}, storage_data={}))
    return read_metadata(content).state_dict_metadata["weight"]


@pytest.mark.parametrize(
    ("after", "knows_strides"), [((), False), ((), True), (((3, 1),), True), ((None,), True)]
)
def test_the_properties_of_both_versions_are_read(
    monkeypatch: pytest.MonkeyPatch, after: tuple[Any, ...], knows_strides: bool
) -> None:
    found = _read(monkeypatch, after, knows_strides=knows_strides)
    assert isinstance(found, StoredTensor) and found.is_filled


@pytest.mark.parametrize(
    ("after", "knows_strides", "says"),
    [
        (((3, 1),), False, rf"strides of tensors, which torch 2.15 reads and {torch.__version__} does not"),
        (([3, 1],), True, "other things than counts"),
        (((3, -1),), True, "other things than counts"),
        (((3, 1.0),), True, "other things than counts"),
        ((True,), True, "other things than counts"),
        (((3, 1), None), True, "unknown fields of TensorProperties"),
    ],
)
def test_other_properties_are_refused(
    monkeypatch: pytest.MonkeyPatch, after: tuple[Any, ...], knows_strides: bool, says: str
) -> None:
    with pytest.raises(ForbiddenError, match=says.replace("+", r"\+")):
        _read(monkeypatch, after, knows_strides=knows_strides)


def test_what_this_torch_reads_is_known() -> None:
    assert len(TensorProperties().__getstate__()) == 5 + metadata_pickle._ARE_STRIDES_KNOWN
