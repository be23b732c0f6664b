"""Parts of a push to servers, without a trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dppo.engines.sglang.records import ServerRecord
from megatron_dppo.engines.weight_sync.fleet import Fleet, RunServers
from megatron_dppo.engines.weight_sync.syncs import SglangSync
from tests.support.sglang_stand_in import StandIn


def runtime(*, takes_turns: bool = True) -> Any:
    """A job of one process."""
    return SimpleNamespace(
        barrier=lambda: None,
        on_main=lambda action: action(),
        is_main=True,
        all_gather=lambda value: [value],
        device=torch.device("cpu"),
        gpu_ledger=SimpleNamespace(
            acquire=lambda what: None, leaves=lambda what: None, takes_turns=takes_turns
        ),
    )


def record_of(server: StandIn, **changes: Any) -> ServerRecord:
    """The record of a server that a run has."""
    made = ServerRecord("s", server.url, "here", 7, "0.5.23", "2026-01-01T00:00:00+00:00", 1)
    return replace(made, **changes)


def run_servers(records: Sequence[ServerRecord], folder: Path) -> RunServers:
    """The servers of a run by their records, which a test may replace."""
    own = runtime()
    return RunServers(lambda: records, own, folder / "released", timeout_s=10.0, api_key=None, nccl={})


def sync_to(
    servers: RunServers,
    *,
    send: Callable[[Fleet, int], None] = lambda fleet, version: None,
    admit: Callable[[Sequence[str], int], None] = lambda urls, version: None,
    probe: Any = None,
    every: int = 1,
    require_sampling: Callable[[Sequence[str]], Mapping[str, str]] = lambda urls: {},
) -> SglangSync:
    """A sync that sends with `send`, and takes servers into the engine with `admit`."""
    transport: Any = SimpleNamespace(needs_begin=False, send=send, close=lambda: None)
    engine: Any = SimpleNamespace(admit=admit)
    options: Any = {"probe": probe, "probe_every": every, "require_sampling": require_sampling}
    return SglangSync(transport, engine, servers, runtime(), **options)
