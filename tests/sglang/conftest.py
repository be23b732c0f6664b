"""One server for the whole session, and the model that it serves."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from serving import START_TIMEOUT_S, Served, command_line, environment, free_port, write_served_model
from transformers import Qwen3MoeForCausalLM


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real server; it and its children end with the session."""
    folder = write_served_model(tmp_path_factory.mktemp("served") / "model")
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    port, log = free_port(), folder.parent / "server.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command_line(folder, port),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(server, f"http://127.0.0.1:{port}", log)
        yield Served(f"http://127.0.0.1:{port}", folder, model)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            if httpx2.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the server did not start (status {server.poll()}):\n{log.read_text()[-4000:]}")
