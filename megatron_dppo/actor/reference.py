"""Computes log-probs of the frozen reference policy: the trainer's own model, with other weights meanwhile."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.actor.actor import Actor
from megatron_dppo.actor.offload import PIECE_BYTES
from megatron_dppo.checkpoints.megatron_folder import load_weights
from megatron_dppo.checkpoints.megatron_weights import weight_buffers
from megatron_dppo.config.schema import Config
from megatron_dppo.types import TrainBatch


class ReferencePolicy:
    """Forwards batches by the reference's weights, once per rollout, in the layout of the trainer.

    The weights wait in the host's memory, this rank's part of them in the model's dtype. They change places
    with the policy's, some bytes at a time, so that the GPU never holds both.

    They are those that the run begins with, or `model.reference`'s; never a checkpoint's that it resumes from.
    With LoRA the run begins with adapters that add 0, so that their factors alone change places.

    The reference's own routers choose its experts, under R3 too. The rollout's choice is the policy's, and
    drifts with it: a reference that followed it would be no fixed policy. The KL under R3 therefore holds what
    other experts change, at the first step already.
    """

    def __init__(self, actor: Actor, config: Config) -> None:
        """Keep the reference's weights; call this before the actor loads a checkpoint.

        Args:
            actor: Actor with the run's initial weights on its device. It has them again afterwards.
            config: The run's.

        Raises:
            ConversionError: `model.reference` does not hold the model that `model.load` describes.
            CheckpointError: It is a Megatron checkpoint that is torn, or of another model.
        """
        self._actor, folder = actor, config.model.reference
        parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
        differing = [parameter for parameter in parameters if folder is not None or parameter.requires_grad]
        buffers = [buffer for chunk in actor.chunks for _, buffer in weight_buffers(chunk)]
        self._host = HostCopy([*differing, *buffers])
        if folder is not None:
            load_weights(actor.chunks, folder, actor.hf)
            self._host.exchange()

    @property
    def num_host_bytes(self) -> int:
        """Bytes that this rank's part of the reference takes of the host's memory."""
        return self._host.num_bytes

    def with_log_probs(self, steps: Sequence[TrainBatch]) -> list[TrainBatch]:
        """Return the batches with `ref_log_probs`, at the temperature of the sampler; every rank calls this."""
        with self._in_place():
            found = [self._actor.forward_log_probs(step.microbatches, is_replaying=False) for step in steps]
        return [
            replace(
                step,
                microbatches=tuple(
                    replace(m, ref_log_probs=values)
                    for m, values in zip(step.microbatches, of_step, strict=True)
                ),
            )
            for step, of_step in zip(steps, found, strict=True)
        ]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the model be the reference inside the block; afterwards it is the policy, bit for bit."""
        assert not self._actor.memory.is_away, "the trainer computes when it is on its GPU"
        self._actor.complete_parameters()
        self._host.exchange()
        try:
            yield
        finally:
            self._host.exchange()


class HostCopy:
    """A copy of tensors in the host's memory, page-locked for GPUs, that can change places with them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors, which must be contiguous and on one device."""
        self._tensors = list(tensors)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        """Number of bytes of all tensors."""
        is_locked = any(tensor.is_cuda for tensor in self._tensors)
        sizes = [min(PIECE_BYTES, self.num_bytes - at) for at in range(0, self.num_bytes, PIECE_BYTES)]
        self._pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=is_locked) for size in sizes]
        for own, kept in self._parts():
            kept.copy_(own)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the tensors' values with the host's, bit for bit; the device holds one part of them twice."""
        for own, kept in self._parts():
            before = own.clone()
            own.copy_(kept)
            kept.copy_(before)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor's bytes, [n] uint8, with their host copy, in parts that do not cross a piece."""
        at = 0
        for tensor in self._tensors:
            left = tensor.detach().view(-1).view(torch.uint8)
            while left.numel():
                index, within = divmod(at, PIECE_BYTES)
                own = left[: PIECE_BYTES - within]
                yield own, self._pieces[index][within : within + own.numel()]
                at, left = at + own.numel(), left[own.numel() :]
