"""Yields a checkpoint's weights as a trainer would send them, read from disk, without a trainer."""

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

    LoRA's updates are added. How many ranks there are does not matter: each reads everything.
    """

    log_probs = None
    """There is no model here to compute them."""

    def __init__(self, folder: Path, dtype: torch.dtype, runtime: Runtime) -> None:
        """Read headers, and compare them with the model's needs.

        Args:
            folder: A Hugging Face folder or a Megatron checkpoint.
            dtype: Of the tensors that are given, as model.dtype is a trainer's.
            runtime: Of this rank.

        Raises:
            CheckpointError: A Megatron checkpoint that is torn, of another model, or holds code.
            ConversionError: A Hugging Face folder that is torn.
        """
        self._hf, self._dtype, self._runtime = read_hf_config(folder), dtype, runtime
        self._source = source_of(folder)

    @property
    def identity(self) -> str:
        """Identity of the weights: changes with the files' names, sizes and times of writing."""
        digest = hashlib.blake2b(digest_size=16)
        for file in sorted(self._source.files):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in Hugging Face names, on this rank's device, layer by layer; one stage only."""
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
        """The only pipeline stage, of one, with rank 0 as its first rank."""
        return 0, 1, self._runtime.is_main
