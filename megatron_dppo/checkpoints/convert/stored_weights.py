"""Reads a checkpoint's weights from disk, and yields them in the form that a trainer sends to engines."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.registry import read_hf_config
from megatron_dppo.checkpoints.convert.pieces import pieces_of
from megatron_dppo.checkpoints.convert.sources import source_of
from megatron_dppo.runtime.process import Runtime


class StoredWeights:
    """All weights of a folder, on every rank; implements `weight_sync.base.WeightOwner`.

    LoRA updates are added. Any number of ranks works, because each rank reads all weights.
    """

    log_probs = None
    """Empty, because no model computes them here."""

    def __init__(self, folder: Path, dtype: torch.dtype, runtime: Runtime) -> None:
        """Read the headers, and compare them with the tensors that the model needs.

        Args:
            folder: A Hugging Face folder or a Megatron checkpoint.
            dtype: Dtype of the yielded tensors, like a trainer's model.dtype.
            runtime: Runtime of this rank.

        Raises:
            CheckpointError: A Megatron checkpoint is torn, belongs to another model, or contains code.
            ConversionError: A Hugging Face folder is torn.
        """
        self._hf, self._dtype, self._runtime = read_hf_config(folder), dtype, runtime
        self._source = source_of(folder)

    @property
    def identity(self) -> str:
        """Identity of the weights: changes with the files' names, sizes and modification times."""
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(self._source.files):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights under Hugging Face names, on this rank's device, layer by layer, as one stage."""
        for piece in pieces_of(self._hf):
            for name, tensor in self._source.read(piece.hf):
                yield name, tensor.to(self._runtime.device, self._dtype_of(name))

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors of `weights` without data."""
        return {
            name: torch.empty(shape, dtype=self._dtype_of(name), device="meta")
            for piece in pieces_of(self._hf)
            for name, shape in zip(piece.hf, piece.hf_shapes, strict=True)
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if stays_float32(name) else self._dtype

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """Stage 0 of one pipeline stage, with rank 0 as its first rank."""
        return 0, 1, self._runtime.is_main
