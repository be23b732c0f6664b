"""A run whose server takes turns with it on the GPU: what happened, in order."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron_dppo.runtime.process import Runtime


class Events(deque[Any]):
    """Entries of a ledger, written into one list with everything else."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def append(self, entry: Any) -> None:
        self.events.append(f"{entry.holder} {'takes' if entry.is_there else 'leaves'}")


def train_in_turns(runtime: Runtime, tables: dict[str, Any], stop_in_rollout: int | None) -> list[str]:
    """Train, with a server that the run starts; with `stop_in_rollout`, SIGTERM comes while that is sampled."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.engines.sglang.server import own_servers
    from megatron_dppo.engines.weight_sync.fleet import Fleet
    from megatron_dppo.engines.weight_sync.probe import Probe
    from megatron_dppo.run.checkpoints import Checkpoints
    from megatron_dppo.run.logger import RunLogger
    from megatron_dppo.run.preemption import Preempted, StopRequests
    from megatron_dppo.run.session import RunSession
    from megatron_dppo.train import Training

    events: list[str] = []
    runtime.gpu_ledger.entries = Events(events)
    plain: Any = Fleet.calling

    def calling(fleet: Fleet, call_of: Callable[[Any], Any], only: Any = None) -> Any:
        if called := [member for member in fleet.members if only is None or member in only]:
            call = call_of(called[0])
            events.append(" ".join([call.path, *call.body.get("tags", [])]))
        return plain(fleet, call_of, only)

    Fleet.calling = calling  # type: ignore[method-assign]
    follow(Checkpoints, "save", "save", events)
    follow(Probe, "expect", "expect", events)
    config = Config.model_validate(tables)
    with (
        StopRequests().handle_signals() as requests,
        RunLogger.open(config, runtime) as logger,
        own_servers(config, runtime),
    ):
        training = Training.prepare(config, RunSession(runtime, logger, requests))
        follow(training.actor, "train_step", "train", events)
        follow(training.rollouts, "next", "sample", events)
        follow(training.rollouts, "evaluate", "evaluate", events)
        if stop_in_rollout is not None:
            signal_while_sampling(training, stop_in_rollout)
        with suppress(Preempted):
            training.run()
            events.append("over")
    return events


def follow(owner: Any, method: str, name: str, events: list[str]) -> None:
    """Write down each call."""
    original = getattr(owner, method)

    def followed(*args: Any, **options: Any) -> Any:
        events.append(name)
        return original(*args, **options)

    setattr(owner, method, followed)


def signal_while_sampling(training: Any, rollout: int) -> None:
    """Send this process SIGTERM right after the first request of that rollout is on its way."""
    from megatron_dppo.engines.sglang.client import SglangClient

    following, generate, asked = training.rollouts.next, SglangClient.generate, threading.Event()

    def next_and_signal(number: int, *arguments: Any) -> Any:
        if number == rollout:
            asked.set()
        return following(number, *arguments)

    async def generate_and_signal(client: SglangClient, *args: Any, **options: Any) -> Any:
        if asked.is_set():
            asked.clear()
            threading.Timer(0.02, os.kill, [os.getpid(), signal.SIGTERM]).start()
        return await generate(client, *args, **options)

    training.rollouts.next = next_and_signal
    SglangClient.generate = generate_and_signal  # type: ignore[method-assign]
