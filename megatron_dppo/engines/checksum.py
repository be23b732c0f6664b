"""Checksum of named tensors, which both ends of a weight sync compute."""

import functools
import hashlib

import torch
from torch import Tensor

_BLOCK = 2**14  # words of 4 bytes; a block and its products fit into a core's cache


class WeightChecksum:
    """Digest of a stream of named tensors; depends on names, dtypes, shapes, bytes and their order.

    A block of words is reduced on its device, to its dot product with random odd numbers modulo 2**64. So one
    changed word always changes the digest, and several changed words fail to change it with a probability of at
    most 2**-32. It does not protect against someone who knows the numbers.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def update(self, name: str, tensor: Tensor) -> None:
        """Add one tensor that was sent or received.

        NumPy never views the tensor's storage: then it could not be resized, and the trainer frees its
        parameters' storage while responses are sampled.
        """
        self._digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        words, rest = torch.split(data, [data.numel() // 4 * 4, data.numel() % 4])
        if words.storage_offset() % 4:
            words = words.clone()
        factors = _odd_numbers(data.device)
        parts = torch.split(words.view(torch.int32), _BLOCK)
        blocks = [(part * factors[: len(part)]).sum() for part in parts]
        numbers: list[int] = [*torch.stack(blocks).tolist(), *rest.tolist()]  # pyright: ignore[reportUnknownMemberType]
        self._digest.update(repr(numbers).encode())

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal."""
        return self._digest.hexdigest()


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    """The same random odd numbers in every process; int64 [_BLOCK]."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator) * 2 + 1).to(device)
