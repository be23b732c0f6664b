"""Server processes: which failed starts are tried again, and what a run's servers/ names."""

import json
import os
import socket
import stat
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.engines.sglang.records import (
    API_KEY,
    ServerRecord,
    api_key,
    common_key,
    key_problems,
    read_records,
    require_registered,
    write_record,
)
from megatron_dppo.engines.sglang.server import Launch, Server, free_port, supervise
from megatron_dppo.errors import ServerError


def test_a_port_is_one_that_the_system_gives_to_nobody_else() -> None:
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1, "drawn at random: servers of one host start at the same time"
    assert all(port < below for port in ports)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize(
    ("says", "num_starts"), [("code: -98, name: EADDRINUSE, message: address already in use", 3), ("no GPU", 1)]
)
def test_only_a_port_that_was_taken_is_tried_again(tmp_path: Path, says: str, num_starts: int) -> None:
    """Each start reads only its new output: an older log is ignored."""
    (tmp_path / "own-0.log").write_text("address already in use\n")
    command = (sys.executable, "-c", f"print({says!r}); raise SystemExit(1)")
    server = Server(Launch(command, {}, "http://127.0.0.1:9", {}), tmp_path, "own-0")
    with pytest.raises(ServerError, match="it ended with status 1"):
        server.start(timeout_s=300)
    assert (tmp_path / "own-0.log").read_text().count(says + "\n") == num_starts + (
        says in "address already in use"
    )


@pytest.mark.parametrize("timeout_s", [0.5, 1.5])
def test_a_server_that_is_late_is_an_error(tmp_path: Path, timeout_s: float) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    server = Server(Launch(command, {}, "http://127.0.0.1:9", {}), tmp_path, "own-0")
    began = time.monotonic()
    try:
        with pytest.raises(ServerError, match=r"rollout\.sglang\.start_timeout_s"):
            server.start(timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - began < 300
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


@pytest.mark.parametrize("is_there", [False, True])
def test_only_the_owner_reads_what_a_server_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """And what the trainer repeats of it, in a log that others may read, is without the key."""
    monkeypatch.setenv(API_KEY, "it's \\ 5")
    folder = tmp_path / "run" / "servers"
    if is_there:  # from an earlier version
        folder.mkdir(parents=True)
        (folder / "own-0.log").write_text("")
    program = f"import os; print(dict(api_key=os.environ[{API_KEY!r}])); raise SystemExit(3)"
    server = Server(
        Launch((sys.executable, "-c", program), os.environ, "http://127.0.0.1:9", {}), folder, "own-0"
    )
    before = os.umask(0)
    try:
        with pytest.raises(ServerError, match=r"(?s)status 3 .*'api_key': \"\*\*\*\""):
            server.start(timeout_s=300)
        write_record(folder / "own-0.json", record("own-0"))
    finally:
        os.umask(before)
    assert "it's" in (folder / "own-0.log").read_text()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *sorted(folder.iterdir()))]
    assert modes == [0o700, 0o600, 0o600]


@pytest.mark.parametrize("of_user", ["", "mine"])
def test_every_rank_has_one_key_while_a_run_has_servers(monkeypatch: pytest.MonkeyPatch, of_user: str) -> None:
    monkeypatch.setenv(API_KEY, of_user)
    of_main: list[str] = []
    main: Any = SimpleNamespace(on_main=lambda choose: of_main.append(choose()) or of_main[0])
    other: Any = SimpleNamespace(on_main=lambda choose: of_main[0])
    with common_key(main):
        assert api_key() == (of_user or of_main[0])
    assert len(of_main[0]) == 32 or of_user
    monkeypatch.delenv(API_KEY)
    with common_key(other):
        assert api_key() == of_main[0]
    assert API_KEY not in os.environ


def test_a_server_on_the_network_requires_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, num_problems in (("", 1), ("k", 0)):
        monkeypatch.setenv(API_KEY, key)
        for host in ("0.0.0.0", "::", "10.1.2.3", "fd99::1", "node7"):
            assert [each.where for each in key_problems(host)] == ["sglang.host"] * num_problems, host
        for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
            assert not list(key_problems(host)), host


def record(name: str) -> ServerRecord:
    """A record of that name."""
    return ServerRecord(name, "http://127.0.0.1:1", "here", pid=1, version="0.5.23", since="now", num_starts=1)


def test_servers_stand_in_the_order_of_the_ranks_that_push_to_them(tmp_path: Path) -> None:
    names = [f"node-{node}-{server}" for node in (2, 10) for server in (1, 11)]
    for name in reversed(names):
        (tmp_path / f"{name}.json").write_text(json.dumps(asdict(record(name))))
    assert read_records(tmp_path) == [record(name) for name in names]


def test_a_record_that_is_removed_meanwhile_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(asdict(record("b"))))
    (tmp_path / "a.json").symlink_to(tmp_path / "removed")  # listed, and not there when it is read
    assert read_records(tmp_path) == [record("b")]


def test_a_torn_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ServerError, match="expected a file of megatron-dppo serve"):
        read_records(tmp_path)
    with pytest.raises(ServerError, match="found no SGLang server"):
        require_registered(tmp_path / "absent")
