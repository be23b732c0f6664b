"""torch's metadata of checkpoints as torch 2.13 and torch 2.15 write it, whichever is installed."""

import pickle
from pathlib import Path
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
from megatron_dppo.checkpoints.metadata_pickle import ForbiddenError, TensorEntry, read_metadata
from megatron_dppo.checkpoints.untrusted import refuse_code
from megatron_dppo.errors import CheckpointError


def _content(patch: pytest.MonkeyPatch, after: tuple[Any, ...], *, knows_strides: bool) -> bytes:
    """The metadata of one tensor, whose properties have the five states of torch 2.13, then these."""
    patch.setattr(metadata_pickle, "_ARE_STRIDES_KNOWN", knows_strides)
    state = TensorProperties(dtype=torch.bfloat16).__getstate__()[:5]
    patch.setattr(TensorProperties, "__getstate__", lambda self: (*state, *after))
    size = torch.Size([2, 3])
    chunks = [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=size)]
    stored = TensorStorageMetadata(properties=TensorProperties(), size=size, chunks=chunks)
    return pickle.dumps(Metadata(state_dict_metadata={"weight": stored}, storage_data={}))


@pytest.mark.parametrize(
    ("after", "knows_strides"), [((), False), ((), True), (((3, 1),), True), ((None,), True)]
)
def test_tensor_properties_of_both_torch_versions_are_read(
    monkeypatch: pytest.MonkeyPatch, after: tuple[Any, ...], knows_strides: bool
) -> None:
    content = _content(monkeypatch, after, knows_strides=knows_strides)
    found = read_metadata(content).state_dict_metadata["weight"]
    assert isinstance(found, TensorEntry) and found.is_filled
    assert found.size == torch.Size([2, 3])
    assert [(chunk.offsets, chunk.sizes) for chunk in found.chunks] == [(torch.Size([0, 0]), found.size)]


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (([3, 1],), "other things than counts"),
        (((3, -1),), "other things than counts"),
        (((3, 1.0),), "other things than counts"),
        ((True,), "other things than counts"),
        (((3, 1), None), "unknown fields of TensorProperties"),
    ],
)
def test_other_properties_are_refused(
    monkeypatch: pytest.MonkeyPatch, after: tuple[Any, ...], says: str
) -> None:
    content = _content(monkeypatch, after, knows_strides=True)
    with pytest.raises(ForbiddenError, match=says):
        read_metadata(content)


def test_a_checkpoint_of_a_newer_torch_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / ".metadata").write_bytes(_content(monkeypatch, ((3, 1),), knows_strides=False))
    with pytest.raises(CheckpointError, match=r"torch 2\.15"):
        refuse_code(tmp_path)


def test_metadata_state_has_the_fields_of_this_torch() -> None:
    assert len(TensorProperties().__getstate__()) == 5 + metadata_pickle._ARE_STRIDES_KNOWN
