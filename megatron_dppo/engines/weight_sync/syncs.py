"""Weight syncs: pause, update, resume and verify SGLang servers, or load the engine in this process."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megatron_dppo.engines.base import RolloutEngine
from megatron_dppo.engines.embedded.engine import TransformersEngine, WeightChecksum
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member, RunServers
from megatron_dppo.engines.weight_sync.probe import Probe
from megatron_dppo.engines.weight_sync.transports import Transport
from megatron_dppo.errors import WeightSyncError
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)
_ROUNDS = 2  # the second round retries servers that were skipped because another server failed


class WeightOwner(Protocol):
    """The source of the weights that a sync sends: an actor, or a checkpoint on disk."""

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, or this pipeline stage's, in Hugging Face names; see `export_hf_weights`."""
        ...

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors that `weights` yields, without data; every rank calls it."""
        ...

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """This rank's pipeline stage, the number of stages, and whether this rank sends for its stage."""
        ...

    @property
    def log_probs(self) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """Function that computes log-probs like `Actor.log_probs`, or None without a model."""
        ...


class WeightSync(Protocol):
    """Pushes the actor's weights, in Hugging Face names, to the rollout engine.

    All ranks call each method together. No sample may be drawn during a push.
    """

    def prepare_push(self) -> None:
        """Compute what the next push needs from the trainer, which may leave its GPU before the push."""
        ...

    def push(self, version: int) -> dict[str, float]:
        """Send all weights, each tensor exactly once, and verify that they arrived.

        Args:
            version: Weight version that samples drawn with these weights report.

        Returns:
            Metrics of this push, the same on every rank.
        """
        ...

    def release_engine(self) -> None:
        """Release the engine's memory until the next push, if engine and trainer take turns on the GPU.

        Its requests are aborted.
        """
        ...

    def close(self) -> None:
        """Close the connections between trainer and engine."""
        ...


class SglangSync:
    """Updates every server of the run, completely or not at all; implements `WeightSync`.

    A server whose update failed gets no requests until a later push has reached it. A new server takes part in
    the next push. If a trainer dies during a push, its servers stay paused with an open update, and the next
    push closes it.
    """

    def __init__(
        self,
        transport: Transport,
        engine: SglangEngine,
        servers: RunServers,
        runtime: Runtime,
        *,
        probe: Probe | None,
        probe_every: int,
        require_sampling: Callable[[Sequence[str]], Mapping[str, str]] | None,
    ) -> None:
        """Store the settings, and call no server.

        Args:
            transport: Transport of the weights.
            engine: This rank's engine, which receives the list of updated servers.
            servers: Servers of the run.
            runtime: Runtime of this rank.
            probe: Probe that compares servers and trainer after a push, or None.
            probe_every: Number of pushes from one comparison to the next; the first push always has one.
            require_sampling: Raises if a server, given by URL, returns log-probs of another distribution than
                it samples from, and returns why servers could not be tried. Rank 0 calls it after the first
                push to a server; None tries none.
        """
        self._transport, self._engine, self._servers, self._runtime = transport, engine, servers, runtime
        self._probe, self._probe_every, self._num_pushes = probe, probe_every, 0
        self._require_sampling, self._tried = require_sampling, set[str]()

    def prepare_push(self) -> None:
        """Compute the probe's expected log-probs; see `WeightSync.prepare_push`."""
        if self._probe is not None and self._num_pushes % self._probe_every == 0:
            self._probe.expect()

    def push(self, version: int) -> dict[str, float]:
        """Send all weights to all servers; see `WeightSync.push`.

        A server that fails a call is left out.
        """
        self._runtime.barrier()  # no rank has requests in flight after it
        updated: list[Member] = []
        faults: dict[str, str] = {}
        for _ in range(_ROUNDS):
            fleet, absent = self._servers.fleet(without=updated)
            self._update(fleet, version)
            updated += fleet.members
            faults = absent | fleet.failures
            if not fleet.failures:
                break
        probed, failed = self._check(updated)
        faults |= failed
        updated = [member for member in updated if member.url not in failed]
        for url, reason in faults.items():
            logger.warning("weights %d: %s gets no requests until a push reaches it: %s", version, url, reason)
        if not updated:
            first = next(iter(faults.values()), "the run's servers/ lists none")
            raise WeightSyncError(
                f"weight version {version}: found no SGLang server that took it (the first: {first}); "
                "expected one. Check that megatron-dppo serve runs with this run's config, and look at its log."
            )
        self._engine.admit([member.url for member in updated], version)
        return {"sync/servers": float(len(updated)), **probed}

    def _check(self, updated: Sequence[Member]) -> tuple[dict[str, float], dict[str, str]]:
        """Compare updated servers with the trainer; return metrics, and why servers failed, by URL."""
        new = [member for member in updated if member.process not in self._tried]
        failed, require_sampling = dict[str, str](), self._require_sampling
        if require_sampling is not None:
            failed |= self._runtime.on_main(lambda: require_sampling([member.url for member in new]))
        self._tried |= {member.process for member in new if member.url not in failed}
        is_due = self._num_pushes % self._probe_every == 0
        self._num_pushes += 1
        if self._probe is None or not is_due:
            return {}, failed
        probed = self._probe.run([member for member in updated if member.url not in failed])
        return probed, failed | self._probe.failures

    def release_engine(self) -> None:
        """See `WeightSync.release_engine`."""
        if self._runtime.gpu_ledger.takes_turns:
            self._servers.release()

    def close(self) -> None:
        """Leave process groups and remove files."""
        self._transport.close()

    def _update(self, fleet: Fleet, version: int) -> None:
        """Update all members of a fleet; a server that fails leaves it, paused and with an open update."""
        started, ledger = time.perf_counter(), self._runtime.gpu_ledger
        ledger.acquire("engine weights")
        if self._runtime.is_main:
            fleet.tell(lambda member: member.calls.pause)
            self._servers.resume(fleet, "weights")
            if self._transport.needs_begin:  # first close an update that an earlier trainer left open
                fleet.tell(lambda member: member.calls.end, may_be_refused=True)
                fleet.tell(lambda member: member.calls.begin)
        fleet.agree(self._runtime.all_gather(fleet.failures))
        self._transport.send(fleet, version)
        ledger.acquire("engine cache")
        if self._runtime.is_main:
            if self._transport.needs_begin:
                fleet.tell(lambda member: member.calls.end)
            self._servers.resume(fleet, "kv_cache")
            fleet.tell(lambda member: member.calls.go_on)
        fleet.agree(self._runtime.all_gather(fleet.failures))
        logger.info(
            "weights %d: %d servers in %.2f s", version, len(fleet.members), time.perf_counter() - started
        )


class InProcessSync:
    """Passes each tensor to this rank's engine, which copies it; implements `WeightSync`."""

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
        self._runtime.gpu_ledger.acquire("engine weights")
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
        self._runtime.gpu_ledger.acquire("engine cache")  # allocated when it samples
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
