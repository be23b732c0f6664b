"""Lets trainer and engine take turns on the GPU, in the order that `runtime.gpu_ledger` documents."""

from megatron_dppo.actor.actor import Actor
from megatron_dppo.engines.weight_sync.factory import WeightSync
from megatron_dppo.runtime.process import Runtime


class Turns:
    """Switches between training and sampling; if the engine has its own GPU, nothing is offloaded.

    All ranks call each method together.
    """

    def __init__(self, actor: Actor, runtime: Runtime) -> None:
        """Start with the trainer's turn, and no engine."""
        self._actor, self._ledger = actor, runtime.gpu_ledger
        self.sync: WeightSync | None = None
        """Weight sync to the engine; None before the engine is connected, when the trainer has every turn."""

    def to_engine(self, version: int) -> dict[str, float]:
        """Push the trainer's weights, give the engine the turn, and return metrics of the push.

        Raises:
            WeightSyncError: The engine did not receive the weights.
        """
        assert self.sync is not None, "an engine is connected before weights are pushed"
        self.to_trainer()
        self.sync.prepare_push()
        if self._ledger.takes_turns:
            self._actor.complete_parameters()
            self._actor.memory.leave()
        return self.sync.push(version)

    def require_engine(self, version: int) -> None:
        """Give the engine the turn, with the current weights, unless it already has the turn."""
        if self._ledger.takes_turns and not self._ledger.holds("engine cache"):
            self.to_engine(version)

    def to_trainer(self) -> None:
        """Give the trainer the turn, unless it already has it; the engine needs a push before it samples again.

        Raises:
            WeightSyncError: The engine does not release its memory.
        """
        if self._actor.memory.is_away:
            assert self.sync is not None, "the trainer leaves for an engine"
            self.sync.release_engine()
            self._actor.memory.come_back()
