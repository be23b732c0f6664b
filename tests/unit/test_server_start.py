"""Starting a server process: which failures are tried again."""

import sys
from pathlib import Path

import pytest

from megatron_dppo.errors import ServerError
from megatron_dppo.rollout.sglang.server import Launch, Server


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
