"""Server processes: which failed starts are tried again, and what a run's servers/ names."""

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_dppo.engines.sglang.server import (
    Launch,
    Server,
    ServerRecord,
    read_records,
    require_registered,
    supervise,
)
from megatron_dppo.errors import ServerError


@pytest.mark.parametrize(
    ("says", "num_starts"), [("code: -98, name: EADDRINUSE, message: address already in use", 3), ("no GPU", 1)]
)
def test_only_a_port_that_was_taken_is_tried_again(tmp_path: Path, says: str, num_starts: int) -> None:
    """Each start looks at what it wrote itself: a log of before says nothing."""
    (tmp_path / "own-0.log").write_text("address already in use\n")
    command = (sys.executable, "-c", f"print({says!r}); raise SystemExit(1)")
    server = Server(Launch(command, {}, "http://127.0.0.1:9", {}), tmp_path, "own-0")
    with pytest.raises(ServerError, match="it ended with status 1"):
        server.start(timeout_s=60)
    assert (tmp_path / "own-0.log").read_text().count(says + "\n") == num_starts + (
        says in "address already in use"
    )


@pytest.mark.parametrize("timeout_s", [0.5, 1.5])
def test_a_server_that_is_late_is_an_error(tmp_path: Path, timeout_s: float) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    server = Server(Launch(command, {}, "http://127.0.0.1:9", {}), tmp_path, "own-0")
    began = time.monotonic()
    try:
        with pytest.raises(ServerError, match=r"rollout\.sglang\.start_timeout_s"):
            server.start(timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - began < timeout_s + 5
    finally:
        server.stop()


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_restarts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int) -> None:
    starts: list[float] = []
    monkeypatch.setattr(Server, "start", lambda self, timeout_s, ended=None: starts.append(timeout_s))
    monkeypatch.setattr(Server, "status", lambda self: 1)
    server = Server(Launch((sys.executable,), {}, "http://127.0.0.1:9", {}), tmp_path, "own-0")
    with pytest.raises(ServerError, match=f"after {max_restarts} restarts"):
        supervise(server, threading.Event(), start_timeout_s=7.0, max_restarts=max_restarts)
    assert starts == [7.0] * (max_restarts + 1)


def record(name: str) -> ServerRecord:
    """A record of that name."""
    return ServerRecord(name, "http://127.0.0.1:1", "here", pid=1, version="0.5.21", since="now", num_starts=1)


def test_servers_stand_in_the_order_of_the_ranks_that_push_to_them(tmp_path: Path) -> None:
    names = [f"node-{node}-{server}" for node in (2, 10) for server in (1, 11)]
    for name in reversed(names):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(record(name))))
    assert read_records(tmp_path) == [record(name) for name in names]


def test_a_torn_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ServerError, match="expected a file of megatron-dppo serve"):
        read_records(tmp_path)
    with pytest.raises(ServerError, match="found no SGLang server"):
        require_registered(tmp_path / "absent")
