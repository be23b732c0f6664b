"""Checksum of named tensors, which both ends of a weight sync compute."""

import hashlib

import torch
from torch import Tensor


class WeightChecksum:
    """Digest of a stream of named tensors; depends on names, dtypes, shapes, bytes and their order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def update(self, name: str, tensor: Tensor) -> None:
        """Add one tensor that was sent or received.

        The bytes are copied first. Storage that NumPy has viewed cannot be resized, and the trainer frees its
        parameters' storage while responses are sampled.
        """
        self._digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        self._digest.update(data.to("cpu", copy=True).numpy().data)

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal."""
        return self._digest.hexdigest()
