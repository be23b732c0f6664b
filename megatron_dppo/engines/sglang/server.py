"""Runs SGLang servers as children of this process: start, wait for health, register, restart, stop.

A server is registered as run/servers/<name>.json once it is healthy (`records.py`).
"""

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from megatron_dppo.architectures.registry import family_of
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang import quantization
from megatron_dppo.engines.sglang.client import Patience, SglangClient
from megatron_dppo.engines.sglang.model import has_own_output, served_model
from megatron_dppo.engines.sglang.options import (
    arguments,
    environment_problems,
    installed_nccl,
    installed_version,
    interpreter,
    is_for_cpu,
    nccl_problems,
    nccl_settings,
    option_problems,
    read_options,
    server_environment,
)
from megatron_dppo.engines.sglang.protocol import generation_of
from megatron_dppo.engines.sglang.records import (
    API_KEY,
    ServerRecord,
    api_key,
    common_key,
    key_problems,
    require_registered,
    without_key,
    write_record,
)
from megatron_dppo.engines.sglang.sampling_settings import argument_problems
from megatron_dppo.errors import ConfigError, Problem, ServerError
from megatron_dppo.runtime.files import make_private, open_private
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)
_ENTRY = f"""
import os, runpy, signal, sys, threading, time

def end_with(parent):
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
if os.environ.get({API_KEY!r}):
    sys.argv[1:1] = ["--api-key", os.environ[{API_KEY!r}]]
runpy.run_module("sglang.launch_server", run_name="__main__")
"""
"""Program of a server's process. It ends with the process that started it, even if that is killed."""
_LOG_TAIL = 3000  # characters of the log in an error message
_PORTS = range(10_000, 16_000)
_PORT_TAKEN, _MOST_STARTS = b"address already in use", 3


@dataclass(frozen=True)
class Launch:
    """Command, environment and URL of a server to start."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)  # with secrets
    url: str
    nccl: Mapping[str, str]  # NCCL's variables, which `environment` has too; its version and torch's


def plan_launch(config: Config, index: int = 0) -> Launch:
    """Build the command for a server of this run, on a free port unless sglang.port sets one.

    Args:
        config: The run's configuration.
        index: Index of the server on its host; each server uses the GPUs after the previous server's GPUs.
    """
    python, table = interpreter(config), dict(config.sglang)
    options = read_options(python)
    if options is None:
        raise ConfigError(_unusable(python))
    if table.get("device") != "cpu" and is_for_cpu(python):
        found, expected = f"{python}, an environment for CPUs", "one for GPUs, as sglang.device is not cpu"
        action = "Run make sglang-venv SGLANG_FOR=gpu, or set sglang.device = 'cpu' to serve on a CPU."
        raise ConfigError(Problem("sglang.python", found, expected, action))
    host = str(table.setdefault("host", "127.0.0.1"))
    problems = [*argument_problems(table), *environment_problems(config), *option_problems(table, options)]
    problems += [*quantization.quantization_problems(config), *nccl_problems(config), *key_problems(host)]
    if problems:
        raise ConfigError(problems)
    if api_key() is None:
        logger.warning(
            "every user of this machine can send this server weights: it requires no key. Start it and the "
            "trainer with the same %s in the environment",
            API_KEY,
        )
    version = installed_version(python)
    try:
        generation_of(version)
    except ServerError as error:
        raise ConfigError(Problem("sglang.python", str(python), "a known version", str(error))) from None
    served_model(config.model.load, ())
    model = quantization.served_folder(config)
    family = family_of(hf := read_model_config(model)[1])
    table = {**family.sglang.arguments, **table}
    is_dummy = quantization.MODEL_PATH in table or has_own_output(hf) or table.get("load_format") == "dummy"
    has_weights = any(model.glob("*.safetensors")) and not is_dummy
    if not has_weights:
        table.setdefault("load_format", "dummy")
        logger.info("the server starts with random weights until a push sends the model's weights")
    is_on_cpu, replay = table.get("device") == "cpu", config.rollout.routing_replay != "off"
    port = int(table.setdefault("port", free_port()))
    if index and not is_on_cpu:
        table["base_gpu_id"] = int(table.get("base_gpu_id", 0)) + index * int(table.get("tp_size", 1))
    if replay and not is_on_cpu:
        table.setdefault("moe_runner_backend", "triton")  # others do not capture all choices
    if not is_on_cpu:
        table = {**quantization.kernel_arguments(config), **table}
    owned = {
        quantization.MODEL_PATH: str(model.absolute()),
        "random_seed": config.run.seed,
        "weight_version": "0" if has_weights else "-1",
        "enable_return_routed_experts": replay,
        "enable_memory_saver": config.rollout.sglang.colocated and not is_on_cpu,
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",  # ignores generation_config.json
    }
    reachable = socket.gethostname() if host in ("0.0.0.0", "::") else host
    nccl = nccl_settings(config)
    return Launch(
        (str(python), "-W", "ignore", "-c", _ENTRY, *arguments(table | owned, options)),
        server_environment(is_on_cpu=is_on_cpu) | nccl,
        f"http://{reachable}:{port}",
        nccl | dict(installed_nccl(python) if nccl and not is_on_cpu else {}),
    )


def free_port() -> int:
    """Return a port of this host that was free a moment ago.

    A server binds it after loading a model. So it is below the range of which the system gives ports to other
    programs meanwhile, unless none is free below.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = [port for port in _PORTS if port < below]
    for port in [*random.SystemRandom().sample(own, min(len(own), 100)), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise ServerError("sglang.port: found no free port; expected one. Set it.")


class Server:
    """One server process and its children; the process that starts it must stop it."""

    def __init__(self, launch: Launch, folder: Path, name: str) -> None:
        """Keep the command; starts no process.

        Args:
            launch: Command and environment.
            folder: The run's servers/, for the registration and the log.
            name: Name of the two files.
        """
        self.launch, self.record = launch, folder / f"{name}.json"
        self.log = folder / f"{name}.log"
        self._name, self._process, self._num_starts = name, None, 0

    def start(self, timeout_s: float, ended: threading.Event | None = None) -> ServerRecord | None:
        """Start the server, wait until it is healthy, and register it. Return None if `ended` was set before.

        SGLang picks ports before it uses them. If another process takes one meanwhile, the server is started
        again.
        """
        for left in reversed(range(_MOST_STARTS)):
            before = self.log.stat().st_size if self.log.exists() else 0
            try:
                return self._start_once(timeout_s, ended)
            except ServerError:
                if not left or _PORT_TAKEN not in self.log.read_bytes()[before:]:
                    raise
                logger.warning(
                    "server %s: another process took a port that it needs; starting it again", self._name
                )
        raise AssertionError("the last start returns or raises")

    def _start_once(self, timeout_s: float, ended: threading.Event | None) -> ServerRecord | None:
        assert self._process is None, "a server is started once, then stopped"
        make_private(self.log.parent)
        with open_private(self.log) as log:  # SGLang logs its arguments, with the key
            self._process = subprocess.Popen(
                self.launch.command,
                env=dict(self.launch.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._num_starts += 1
        try:
            version = self._wait(timeout_s, ended or threading.Event())
            if version is None:
                return None
            record = ServerRecord(
                name=self._name,
                url=self.launch.url,
                host=socket.gethostname(),
                pid=self._process.pid,
                version=version,
                since=datetime.now().astimezone().isoformat(timespec="seconds"),
                num_starts=self._num_starts,
                nccl=self.launch.nccl,
            )
            write_record(self.record, record)
        except BaseException:
            self.stop(grace_s=0)
            raise
        logger.info("server %s is ready at %s (SGLang %s)", self._name, record.url, record.version)
        return record

    def status(self) -> int | None:
        """Return the exit status of the server, or None while it runs."""
        assert self._process is not None, "the server was started"
        return self._process.poll()

    def stop(self, grace_s: float = 20.0) -> None:
        """Terminate the server and its children, then kill the rest; return at once if none runs."""
        self.record.unlink(missing_ok=True)
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None and grace_s > 0:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # processes left in its session
        process.wait()

    def _wait(self, timeout_s: float, ended: threading.Event) -> str | None:
        """Wait until the server is healthy, and return its version, or None if the wait was cancelled."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (status := self.status()) is not None:
                raise ServerError(self._sentence(f"it ended with status {status} during its start"))
            if (version := asyncio.run(_version_if_healthy(self.launch.url))) is not None:
                return version
            if ended.wait(0.5):
                return None
        raise ServerError(self._sentence(f"no reply within {timeout_s:g} s (rollout.sglang.start_timeout_s)"))

    def _sentence(self, found: str) -> str:
        tail = without_key(self.log.read_text(errors="replace"))[-_LOG_TAIL:]
        return (
            f"server {self._name}: {found}; expected status 200 from {self.launch.url}/health. Fix "
            f"the error in its log ({self.log}):\n{tail}"
        )


def supervise(server: Server, ended: threading.Event, *, start_timeout_s: float, max_restarts: int) -> None:
    """Keep a server running until `ended` is set, then stop it."""
    num_restarts = 0
    try:
        server.start(start_timeout_s, ended)
        while not ended.wait(0.5):
            if (status := server.status()) is None:
                continue
            server.stop()
            if num_restarts == max_restarts:
                raise ServerError(
                    f"server at {server.launch.url}: found it ended with status {status} after {num_restarts} "
                    f"restarts; expected it to run. Fix the error in its log ({server.log}), or raise "
                    "rollout.sglang.max_restarts."
                )
            num_restarts += 1
            logger.warning(
                "the server ended with status %s; restart %d of %d", status, num_restarts, max_restarts
            )
            server.start(start_timeout_s, ended)
    finally:
        server.stop()


@contextmanager
def own_servers(config: Config, runtime: Runtime) -> Generator[None]:
    """Run rollout.sglang.num_own_servers servers during the body; every rank enters once they are ready.

    Servers that exit by themselves are restarted, like the servers of `megatron-dppo serve`. Their API key is
    that of the environment, or a new one.
    """
    if config.rollout.engine != "sglang":
        yield
        return
    num_servers = config.rollout.sglang.num_own_servers
    if not num_servers:
        runtime.on_main(lambda: require_registered(config.run.folder / "servers"))
        yield
        return
    ended = threading.Event()
    with common_key(runtime), ThreadPoolExecutor(num_servers, thread_name_prefix="server") as threads:
        try:
            runtime.on_main(lambda: _start(config, num_servers, threads, ended))
            yield
        finally:
            ended.set()


def _unusable(python: Path) -> Problem:
    """Return the problem with an SGLang that is missing or does not import."""
    version = installed_version(python)
    if version is None:
        action = "Run make sglang-venv, or set sglang.python to the interpreter that SGLang is installed in."
        return Problem("sglang.python", f"{python}, without SGLang", "an interpreter with it", action)
    found, action = f"{python}, where SGLang {version} does not import", "Fix the error that this prints: "
    action += f"{python} -c 'import sglang.srt.server_args'"
    return Problem("sglang.python", found, "an SGLang that imports", action)


async def _version_if_healthy(url: str) -> str | None:
    async with SglangClient(url, Patience(control_timeout_s=5.0), api_key=api_key()) as client:
        if not await client.is_healthy():
            return None
    async with SglangClient(url, api_key=api_key()) as client:
        return (await client.connect())[1].version


def _start(config: Config, num_servers: int, threads: ThreadPoolExecutor, ended: threading.Event) -> None:
    options, folder = config.rollout.sglang, config.run.folder / "servers"
    logger.info("starting %d SGLang servers; their logs are %s/own-*.log", num_servers, folder)
    running: list[Future[None]] = []
    servers = [Server(plan_launch(config, index), folder, f"own-{index}") for index in range(num_servers)]
    for server in servers:
        server.record.unlink(missing_ok=True)  # left by a run that was killed
        timeout_s, most = options.start_timeout_s, options.max_restarts
        running.append(threads.submit(supervise, server, ended, start_timeout_s=timeout_s, max_restarts=most))
    while not all(server.record.exists() for server in servers):
        for future in running:
            if future.done():
                future.result()
                raise ServerError("an SGLang server exited during its start")
        ended.wait(0.2)
