"""What a run's servers/ names."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_dppo.engines.sglang.server import ServerRecord, registered, require_registered
from megatron_dppo.errors import ServerError


def record(name: str) -> ServerRecord:
    """A record of that name."""
    return ServerRecord(name, "http://127.0.0.1:1", "here", pid=1, version="0.5.21", since="now", num_starts=1)


def test_servers_stand_in_the_order_of_the_ranks_that_push_to_them(tmp_path: Path) -> None:
    names = [f"node-{node}-{server}" for node in (2, 10) for server in (1, 11)]
    for name in reversed(names):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(record(name))))
    assert registered(tmp_path) == [record(name) for name in names]


def test_a_torn_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ServerError, match="megatron-dppo serve"):
        registered(tmp_path)
    with pytest.raises(ServerError, match="found no SGLang server"):
        require_registered(tmp_path / "absent")
