"""The device and the process group: the one place that knows on what hardware this process runs."""

import logging
import os
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron_dppo.errors import ConfigError, Problem

T = TypeVar("T")
logger = logging.getLogger("megatron_dppo")


@dataclass(frozen=True)
class Runtime:
    """This process's place in the job, and the device it computes on."""

    device: torch.device
    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Small picklable objects only."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give every rank its result; an exception there is raised everywhere."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001 - carried to the other ranks, then raised
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        flags = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def peak_bytes(self) -> int:
        """Peak memory so far: of the device, or of this process where the device is the CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self.host_peak_bytes()

    def host_peak_bytes(self) -> int:
        """Peak resident memory of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that clocks tell the truth."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def world_size_from_launcher() -> int:
    """Number of processes that torchrun or srun started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(num_threads: int = 1, timeout_s: float = 1800.0) -> Runtime:
    """Pick the device and join the process group (NCCL on GPUs, gloo elsewhere).

    Raises:
        ConfigError: The launcher set WORLD_SIZE without RANK.
    """
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)
    world_size = world_size_from_launcher()
    if world_size > 1 and "RANK" not in os.environ:
        raise ConfigError(
            Problem(
                "environment", "WORLD_SIZE without RANK", "both, as torchrun sets them", "Start with torchrun."
            )
        )
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device, backend = torch.device("cuda", local_rank), "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        if world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    _configure_logging(rank)
    return Runtime(device=device, rank=rank, world_size=world_size)


def quiet_library_warnings() -> None:
    """Leave out what Megatron and torch.distributed warn about on every start; call before importing them."""
    for module in (r"megatron\.", r"torch\.distributed"):
        warnings.filterwarnings("ignore", module=module)


def _configure_logging(rank: int) -> None:
    """Rank 0 speaks; the others only when something is wrong."""
    mark = "" if rank == 0 else f"rank {rank} "
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s {mark}%(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("megatron_dppo").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Stopwatch:
    """Seconds spent in named phases of one rollout."""

    runtime: Runtime
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def resumed(cls, runtime: Runtime, seconds: Mapping[str, float]) -> "Stopwatch":
        """Go on from what `stop` gave before."""
        phases = {phase: elapsed for phase, elapsed in seconds.items() if phase != "total"}
        return cls(runtime, phases, time.perf_counter() - seconds.get("total", 0.0))

    def time(self, phase: str) -> "_Phase":
        """Context manager: add the time of its body to `phase`."""
        return _Phase(self, phase)

    def stop(self) -> dict[str, float]:
        """Seconds of each phase, and "total" since the watch was made."""
        return {**self.seconds, "total": time.perf_counter() - self.started}


@dataclass
class _Phase:
    watch: Stopwatch
    phase: str
    started: float = 0.0

    def __enter__(self) -> None:
        self.watch.runtime.synchronize()
        self.started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.watch.runtime.synchronize()
        elapsed = time.perf_counter() - self.started
        self.watch.seconds[self.phase] = self.watch.seconds.get(self.phase, 0.0) + elapsed
