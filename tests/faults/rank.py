"""One rank of a real run with faults in it (`run`), or without: `python rank.py CONFIG.toml`.

The fault strikes in a function of the product that is wrapped from outside; the product knows nothing of it.
"""

import errno
import importlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

# Where a fault can strike: (module, attribute, whether before or after the call).
MOMENTS: dict[str, tuple[str, str, str]] = {
    "start": ("megatron_dppo.actor.actor", "Actor.__init__", "before"),
    "rollout": ("megatron_dppo.engines.embedded.continuous_batch", "ContinuousBatch._decode", "after"),
    "step": ("megatron_dppo.actor.actor", "Actor.train_step", "before"),
    "gradient": ("megatron_dppo.actor.actor", "Actor.accumulate_gradients", "after"),
    "update": ("megatron_dppo.actor.actor", "Actor.train_step", "after"),
    "row": ("megatron_dppo.run_folder.folder", "RunFolder.write_step", "before"),
    "sync": ("megatron_dppo.engines.weight_sync.syncs", "InProcessSync.push", "before"),
    "rollout end": ("megatron_dppo.run.parts", "RunParts.finish_rollout", "before"),
    "save": ("megatron_dppo.run.checkpoints", "Checkpoints.save", "before"),
    "write": (
        "megatron_dppo.checkpoints.megatron_save",
        "FileSystemWriterAsync.write_preloaded_data",
        "after",
    ),
    "publish": ("megatron_dppo.checkpoints.checkpoint_folder", "publish", "before"),
    "replace": ("megatron_dppo.checkpoints.checkpoint_folder", "hide", "after"),
    "judge": ("megatron_dppo.checkpoints.checkpoint_folder", "faults", "before"),
    "load": ("megatron_dppo.run.checkpoints", "load", "before"),
    "flip": ("megatron_dppo.checkpoints.checkpoint_folder", "set_latest", "before"),
    "evaluation": ("megatron_dppo.rollout.rollouts", "Rollouts.evaluate", "after"),
    # Of runs that sample ahead.
    "wait": ("megatron_dppo.rollout.producer", "Producer.progress", "after"),
    "hold": ("megatron_dppo.rollout.producer", "Producer.hold", "before"),
    "abort": ("megatron_dppo.engines.sglang.client", "SglangClient.abort", "before"),
    "updated": ("megatron_dppo.engines.weight_sync.transports", "DiskTransport.send", "after"),
    "go on": ("megatron_dppo.rollout.producer", "Producer.go_on", "before"),
    "group": ("megatron_dppo.rollout.groups", "GroupMaker.begin", "before"),
}


def strike(kind: str, arguments: tuple[Any, ...]) -> None:
    """Do the harm."""
    me = os.getpid()
    os.write(2, f"FAULT {time.monotonic()} {kind}\n".encode())
    if kind == "SIGKILL":
        os.kill(me, signal.SIGKILL)
    elif kind in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"):
        os.kill(me, getattr(signal, kind))
    elif kind == "SIGTERM twice":
        os.kill(me, signal.SIGTERM)
        threading.Timer(1.3, os.kill, (me, signal.SIGTERM)).start()
        time.sleep(600)
    elif kind == "SIGSTOP":
        os.kill(me, signal.SIGSTOP)
    elif kind == "raise":
        raise ValueError("injected")
    elif kind == "hang":
        while True:
            time.sleep(0.05)
    elif kind == "slow":
        time.sleep(1.0)
    elif kind == "disk full":  # large files fail, as they do on a full disk; metrics.jsonl still fits
        is_full = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY  # free it then
        most = resource.RLIM_INFINITY if is_full else 200_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    elif kind == "no room for rows":  # the log, which is a file here, is shorter
        file = arguments[0].path / "metrics.jsonl"
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, resource.RLIM_INFINITY))
    elif kind in ("EIO", "ESTALE"):  # of every call below the folder, from now on
        from tests.faults import failing_calls  # a second run has this file as its program

        failing_calls.install()
        calls = failing_calls.FailingCalls(arguments[0], 0, getattr(errno, kind), lasts=True)
        failing_calls.begin(calls)
    elif kind == "second run":
        alone = os.environ | {"WORLD_SIZE": "1", "RANK": "0"}
        command = [sys.executable, __file__, sys.argv[-1]]
        second = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
        os.write(2, f"second run ended with {second.returncode}: {second.stderr[-1000:]}\n".encode())
    elif kind == "torn row":
        with (arguments[0].path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "rollout"')
        os.kill(me, signal.SIGKILL)
    elif kind in ("NaN gradient", "inf gradient"):
        value = float("nan" if kind.startswith("NaN") else "inf")
        next(arguments[0].chunks[0].parameters()).main_grad.view(-1)[0] = value
    elif kind == "NaN metric":
        arguments[0].logger.add_values({"injected/value": float("nan")})
    elif kind == "NaN weight":
        next(arguments[0].chunks[0].parameters()).data.view(-1)[:] = float("nan")
    else:
        raise AssertionError(f"unknown fault {kind}")


def install(fault: dict[str, Any]) -> None:
    """Wrap the function in which the fault strikes, on the ranks that it strikes."""
    if fault["rank"] not in ("all", int(os.environ.get("RANK", "0"))):
        return
    module_name, attribute, when = MOMENTS[fault["moment"]]
    owner: Any = importlib.import_module(module_name)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    is_static = isinstance(vars(owner).get(name), staticmethod)
    function: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        is_now = next(calls) in fault["numbers"]
        if is_now and when == "before":
            strike(fault["kind"], arguments)
        result = function(*arguments, **options)
        if is_now and when == "after":
            strike(fault["kind"], arguments)
        return result

    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)


def run(config: str, faults: Sequence[dict[str, Any]]) -> None:
    """Run the command line's `train` with faults installed."""
    from megatron_dppo import cli
    from megatron_dppo.runtime import process as runtime

    if faults:
        runtime.quiet_library_warnings()
        importlib.import_module("megatron_dppo.mcore.cpu").install()
    for fault in faults:
        install(fault)
    sys.argv = ["megatron-dppo", "train", config]
    cli.main()


if __name__ == "__main__":
    run(sys.argv[1], [])
