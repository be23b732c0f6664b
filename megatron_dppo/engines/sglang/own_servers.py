"""Starts the servers that a run owns, as children of its rank 0."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.server import Server, plan_launch, require_registered, supervise
from megatron_dppo.errors import ServerError
from megatron_dppo.runtime.process import Runtime

logger = logging.getLogger(__name__)


@contextmanager
def own_servers(config: Config, runtime: Runtime) -> Iterator[None]:
    """Run rollout.sglang.num_own_servers servers during the body; every rank enters once they are ready.

    Servers that exit by themselves are restarted, like the servers of `megatron-dppo serve`.

    Raises:
        ConfigError: See `plan_launch`.
        ServerError: A server does not start; or the run starts no servers and its servers/ lists none.
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
    with ThreadPoolExecutor(num_servers, thread_name_prefix="server") as threads:
        try:
            runtime.on_main(lambda: _start(config, num_servers, threads, ended))
            yield
        finally:
            ended.set()


def _start(config: Config, num_servers: int, threads: ThreadPoolExecutor, ended: threading.Event) -> None:
    options, folder = config.rollout.sglang, config.run.folder / "servers"
    logger.info("starting %d SGLang servers; their logs are %s/own-*.log", num_servers, folder)
    running: list[Future[None]] = []
    servers = [Server(plan_launch(config, index), folder, f"own-{index}") for index in range(num_servers)]
    for server in servers:
        server.record.unlink(missing_ok=True)  # left by a run that was killed
        limits = {"start_timeout_s": options.start_timeout_s, "max_restarts": options.max_restarts}
        running.append(threads.submit(supervise, server, ended, **limits))
    while not all(server.record.exists() for server in servers):
        for future in running:
            if future.done():
                future.result()
                raise ServerError("an SGLang server exited during its start")
        ended.wait(0.2)
