"""Computes log-probs of the frozen reference policy, with the trainer's model and swapped weights."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

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

    This rank's part of the weights is kept in host memory, in the model's dtype. It is swapped with the
    policy's weights, some bytes at a time, so that the GPU never has both.

    The reference has the run's initial weights, or the weights of `model.reference`, but never the weights of a
    checkpoint to resume. With LoRA the run starts with adapters that add 0, so only their factors are swapped.

    The reference's own routers choose its experts, under R3 too. The rollout's choice comes from the policy and
    drifts with it, so a reference that replayed it would not be a fixed policy. Under R3 the KL therefore
    includes the effect of different experts, even at the first step.
    """

    def __init__(self, actor: Actor, config: Config) -> None:
        """Keep the reference's weights; call this before the actor loads a checkpoint.

        Args:
            actor: Actor with the run's initial weights on its device. It has them again afterwards.
            config: The run's.
        """
        self._actor, folder = actor, config.model.reference
        parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
        differing = [parameter for parameter in parameters if folder is not None or parameter.requires_grad]
        buffers = [buffer for chunk in actor.chunks for _, buffer in weight_buffers(chunk)]
        self._host = HostCopy([*differing, *buffers])
        if folder is not None:
            load_weights(actor.chunks, folder, actor.hf)
            self._host.exchange()

    def with_log_probs(self, steps: Sequence[TrainBatch]) -> list[TrainBatch]:
        """Return the batches with `ref_log_probs`, at the temperature of the sampler; every rank calls this."""
        with self._in_place():
            found = [self._actor.forward_log_probs(step.microbatches, is_replaying=False) for step in steps]
        return [step.with_column("ref_log_probs", values) for step, values in zip(steps, found, strict=True)]

    @contextmanager
    def _in_place(self) -> Generator[None]:
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
