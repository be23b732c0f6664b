"""The SGLang servers of a measurement: those of the run, judged, or one for its time alone."""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem, ServerError
from megatron_dppo.rollout.sglang.client import SglangClient
from megatron_dppo.rollout.sglang.protocol import ServerFacts
from megatron_dppo.rollout.sglang.server import API_KEY, registered
from megatron_dppo.runtime import Runtime

logger = logging.getLogger("megatron_dppo.tools.measure_mismatch")

NAME = "measurement"
_SET_PARENT_DEATH_SIGNAL = 1  # of Linux's prctl
_GRACE_S = 60.0
_LOG_TAIL = 3000  # characters of a log that an error shows


def require_usable_servers(config: Config) -> None:
    """Go on only with servers that hold the weights of model.load, and tell what is asked of them.

    Raises:
        ConfigError: A server serves another folder, was given other weights since, or captures no routes.
        ServerError: There is none, or one does not answer.
    """
    folder = config.run.folder / "servers"
    records = registered(folder)
    if not records:
        raise ServerError(
            f"{folder}: found no SGLang server; expected one. Start it with megatron-dppo serve and the config "
            "of this run, and wait until it answers; or give --serve."
        )
    problems: list[Problem] = []
    for record in records:
        facts = asyncio.run(_facts(record.url))
        where = f"server {record.name} at {record.url}"
        if Path(facts.model_path).resolve() != config.model.load.resolve():
            action = "Start a server with this config, or name the folder that it serves."
            problems.append(Problem(where, facts.model_path, f"model.load, {config.model.load}", action))
        if facts.weight_version != 0:
            found, action = f"weights of version {facts.weight_version}", "Restart it; a run has pushed others."
            problems.append(Problem(where, found, "those of model.load, version 0", action))
        if config.rollout.routing_replay != "off" and not facts.captures_routes:
            action = "Restart it with rollout.routing_replay = 'measure'."
            problems.append(Problem(where, "no capture of routes", "one", action))
    if problems:
        raise ConfigError(problems)


async def _facts(url: str) -> ServerFacts:
    async with SglangClient(url, api_key=os.environ.get(API_KEY)) as client:
        return (await client.connect())[1]


@contextmanager
def serving(config: Config, config_file: Path, runtime: Runtime) -> Iterator[None]:
    """A server in `run.folder`/servers while the body runs; every rank enters it together.

    Rank 0 starts `megatron-dppo serve`, which ends with it, however it ends (on Linux), and so does the server.

    Args:
        config: What `config_file` holds.
        config_file: For the command.
        runtime: This process.

    Raises:
        ServerError: It does not start, or not within rollout.sglang.start_timeout_s.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        runtime.on_main(lambda: _start(config, config_file, started))
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait(_GRACE_S)


def _start(config: Config, config_file: Path, started: list["subprocess.Popen[bytes]"]) -> None:
    log = config.run.folder / "serve.log"
    servers, timeout_s = config.run.folder / "servers", config.rollout.sglang.start_timeout_s
    command = [sys.executable, "-m", "megatron_dppo", "serve", str(config_file), "--name", NAME]
    logger.info("starting an SGLang server; its log is %s", servers / f"{NAME}.log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=_end_with_parent
        )
    started.append(process)
    deadline = time.monotonic() + timeout_s
    while not registered(servers):
        status = process.poll()
        if status is not None or time.monotonic() > deadline:
            found = f"no answer within {timeout_s:g} s" if status is None else f"it ended with status {status}"
            tail = log.read_text(errors="replace")[-_LOG_TAIL:]
            raise ServerError(f"--serve: found {found}; expected a server. Mend what its log says:\n{tail}")
        time.sleep(0.5)


def _end_with_parent() -> None:
    """In the child, before it becomes the command: SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
