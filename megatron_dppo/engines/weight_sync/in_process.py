"""Weight sync to an engine in the trainer's process."""

from collections.abc import Callable, Iterator

from torch import Tensor

from megatron_dppo.engines.base import RolloutEngine
from megatron_dppo.engines.checksum import WeightChecksum
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.errors import WeightSyncError
from megatron_dppo.runtime.process import Runtime


class InProcessSync:
    """Passes each tensor to this rank's engine, which copies it; implements `weight_sync.base.WeightSync`."""

    def __init__(
        self, weights: Callable[[], Iterator[tuple[str, Tensor]]], engine: RolloutEngine, runtime: Runtime
    ) -> None:
        """Connect an actor's `weights` with an engine; neither is owned."""
        self._weights, self._engine, self._runtime = weights, engine, runtime
        self.received = ""
        """Checksum of the weights that the engine received last."""

    def prepare_push(self) -> None:
        """Do nothing: `push` verifies checksums."""

    def push(self, version: int) -> dict[str, float]:
        """Send all weights; see `WeightSync.push`. Every rank's engine must hold the same bits."""
        self._runtime.gpu_ledger.takes("engine weights")
        sent, stream = WeightChecksum(), self._weights()

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream:
                sent.update(name, tensor)
                yield name, tensor

        received = self._engine.load_weights(checked(), version)
        for name, tensor in stream:  # tensors that the engine did not read
            sent.update(name, tensor)
        if received != sent.hexdigest():
            raise WeightSyncError(
                f"weight version {version}: the engine received {received}, the actor sent {sent.hexdigest()}. "
                "Expected the same bits in the same order. This is a fault of the sync: report it."
            )
        checksums = self._runtime.all_gather(received)
        if len(set(checksums)) != 1:
            raise WeightSyncError(
                f"weight version {version}: ranks received different weights ({checksums}). "
                "Expected equal weights. The data-parallel copies of the model have drifted apart: report it."
            )
        self.received = received
        self._runtime.gpu_ledger.takes("engine cache")  # allocated when it samples
        changed = getattr(self._engine, "changed_fraction", None)
        return {} if changed is None else {"sync/changed_weights_fraction": changed}

    def release_engine(self) -> None:
        """See `WeightSync.release_engine`; the cache goes with the samples."""
        if self._runtime.gpu_ledger.takes_turns:
            assert isinstance(self._engine, TransformersEngine), "the only engine in the trainer's process"
            self._engine.release_weights()
            self._runtime.gpu_ledger.leaves("engine cache")
            self._runtime.gpu_ledger.leaves("engine weights")

    def close(self) -> None:
        """Do nothing: neither end is owned."""
