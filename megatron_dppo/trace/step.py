"""Runs the gradient step of one rank in this process, which is unusable afterwards."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.actor.actor import Actor
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.registry import model_sizes, read_hf_config
from megatron_dppo.config.schema import Config
from megatron_dppo.mcore.fixes import prime_adam_states
from megatron_dppo.trace import stand_ins
from megatron_dppo.trace.batch import full_microbatch, lengths_of
from megatron_dppo.trace.collectives import PretendedWorld
from megatron_dppo.trace.ledger import FORWARD, STEP, Count, Ledger, Peak
from megatron_dppo.trace.tensors import FakeFloats
from megatron_dppo.types import TrainBatch


@dataclass(frozen=True)
class StepSettings:
    """Settings of one traced step.

    Attributes:
        config: Config of the run.
        num_layers: Number of layers of the traced model, which replaces the configured one.
        layout: Layout of the simulated processes.
        rank: Traced rank.
        num_tokens: Number of tokens in each micro-batch, over its context-parallel ranks.
        longest: Most tokens of a sequence.
        num_microbatches: Number of micro-batches in the step.
    """

    config: Config
    num_layers: int
    layout: Layout
    rank: int
    num_tokens: int
    longest: int
    num_microbatches: int


@dataclass(frozen=True)
class TracedStep:
    """Memory, launches and waits of one rank's step.

    Attributes:
        num_layers: Number of the model's layers.
        own_layers: Number of this rank's layers.
        held: Live bytes between steps.
        peaks: Most live bytes in each phase.
        count: Operators after the build.
        seconds: Duration of the trace.
    """

    num_layers: int
    own_layers: int
    held: Peak
    peaks: dict[str, Peak]
    count: Count
    seconds: float


def run_step(settings: StepSettings, announce: Callable[[str, int], None]) -> TracedStep:
    """Build the actor of one rank and take one gradient step.

    Args:
        settings: Settings of the step.
        announce: Callback with the phase and the live bytes, after every operator.

    Raises:
        MegatronDppoError: Any error of `Actor`.
        TraceError: The step's shapes depend on values that a trace does not compute.
    """
    started = time.perf_counter()
    layout, config = settings.layout, settings.config
    hf = read_hf_config(config.model.load) | {"num_hidden_layers": settings.num_layers}
    ledger = Ledger(announce)
    own = settings.num_tokens // layout.context // layout.tensor
    world = PretendedWorld(settings.rank, layout.world_size, (own, 1, hf["hidden_size"]))
    stand_ins.install(ledger)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf))
        model = config.model.model_copy(update={"load": Path(folder), "layer_spec": "torch"})
        config = config.model_copy(update={"model": model})
        batch = _batch(settings, config, hf)
        with FakeFloats(ledger, world):
            actor = Actor(config, world.runtime)
            prime_adam_states(actor.optimizer)
            with actor.memory.states_here():
                pass
            held = Peak(ledger.num_bytes, ledger.by_line.copy())
            ledger.count = Count()
            _watch(actor, ledger)
            with ledger.during(FORWARD):
                actor.train_step(batch, is_first=False)
    chunks: list[Any] = actor.chunks
    own_layers = sum(len(chunk.decoder.layers) for chunk in chunks)
    seconds = time.perf_counter() - started
    return TracedStep(settings.num_layers, own_layers, held, ledger.peaks, ledger.count, seconds)


def _watch(actor: Actor, ledger: Ledger) -> None:
    """Set the ledger's phase when the loss starts and ends, and when the optimizer's step starts."""
    head: Any = actor._head
    policy_loss, step = head.policy_loss, actor.optimizer.step

    def watched_loss(*args: Any) -> Any:
        ledger.is_in_loss = True
        return policy_loss(*args)

    def watched_step(*args: Any) -> Any:
        with ledger.during(STEP):
            return step(*args)

    def end_loss(_: torch.Tensor) -> None:
        ledger.is_in_loss = False

    def follow(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(end_loss)

    head.policy_loss, actor.optimizer.step = watched_loss, watched_step
    last: Any = actor.chunks[-1]
    if last.post_process:
        last.decoder.final_layernorm.register_forward_pre_hook(follow)


def _batch(settings: StepSettings, config: Config, hf: dict[str, Any]) -> TrainBatch:
    routing = model_sizes(hf).routing if config.rollout.routing_replay != "off" else None
    lengths = lengths_of(settings.num_tokens, settings.longest)
    one = full_microbatch(lengths, hf["vocab_size"], routing, config.rollout.num_topk_log_probs, has_old=True)
    num = settings.num_microbatches
    return TrainBatch((one,) * num, num * settings.num_tokens * settings.layout.data, num * len(lengths))
