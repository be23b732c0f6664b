"""Starts this process's device and process groups."""

import logging
import os
import pickle
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a process group exists: its defaults would keep it after stop()
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from megatron_dppo.errors import ConfigError, Problem, ShortageError
from megatron_dppo.runtime.gpu_ledger import GpuLedger
from megatron_dppo.runtime.joining import join
from megatron_dppo.runtime.libraries import Libraries, gpus_of_machine, nccl_version, usable_libraries

T = TypeVar("T")
logger = logging.getLogger("megatron_dppo")
_LEAST_FILES = 256  # a process of the smallest run opens 140
_MOST_FILES = 1 << 20  # if there is no limit


@dataclass
class Progress:
    """Rollout, step and phase of this process, for error messages. Setting any of them sets `since` as well."""

    rollout: int | None = None
    step: int | None = None
    phase: str = ""
    since: float = field(default_factory=time.monotonic)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "since":  # set last: a reader of the new time also sees the change
            super().__setattr__("since", time.monotonic())

    def describe(self) -> str:
        """Format the progress for a message: "rollout 3, step 12, phase train"; rollouts count from 1."""
        number = None if self.rollout is None else self.rollout + 1
        known = (("rollout", number), ("step", self.step), ("phase", self.phase or None))
        return ", ".join(f"{name} {value}" for name, value in known if value is not None) or "start-up"


class RaisedOnMain(Exception):
    """The cause of an exception that rank 0 raised, on the ranks that only repeat it."""


@dataclass(frozen=True)
class Runtime:
    """This process's rank in the job, and the device that it computes on.

    Ranks exchange small objects through `control`, a gloo group. A rank that waits in gloo keeps its GPU free.
    NCCL would run a kernel on the GPU, on which a colocated engine may be sampling.
    """

    device: torch.device
    rank: int
    world_size: int
    progress: Progress = field(default_factory=Progress, compare=False)
    control: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    """Gloo group of all ranks; None means the default group."""
    gpu_ledger: GpuLedger = field(
        default_factory=lambda: GpuLedger(give_back_memory, free_device_bytes, outside_device_bytes),
        compare=False,
        repr=False,
    )
    """Holders of the device's memory: trainer, engine, or both."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and logs."""
        return self.rank == 0

    @property
    def nccl_version(self) -> str | None:
        """Version of the NCCL that sends tensors between GPUs, or None on a CPU."""
        return nccl_version() if self.device.type == "cuda" else None

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order. Only for small picklable objects."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and give every rank its result; an exception there is raised everywhere."""
        outcome: list[Any] = [None, None]
        raised: Exception | None = None
        if self.is_main:
            try:
                outcome[0] = action()
            except Exception as error:  # noqa: BLE001 - carried to the other ranks, then raised
                raised, outcome[1] = error, _portable(error)
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if raised is not None:
            raise raised
        if outcome[1] is not None and not self.is_main:
            raise outcome[1] from RaisedOnMain("rank 0 raised this, and knows from where")
        return outcome[0]

    def exchange(self, parcels: list[Tensor]) -> list[Tensor]:
        """Send `parcels[r]` to rank r, peer to peer, and return the parcels received, in rank order.

        Args:
            parcels: [n] uint8 on the CPU, one for each rank. The list is emptied, to avoid a third copy in
                memory.
        """
        assert len(parcels) == self.world_size, "one parcel for each rank, empty ones too"
        to_send = [parcel.numel() for parcel in parcels]
        incoming = torch.empty(self.world_size, dtype=torch.int64)
        dist.all_to_all_single(incoming, torch.tensor(to_send), group=self.control)
        to_receive: list[int] = incoming.tolist()
        sent = torch.cat(parcels).to(self.device)
        parcels.clear()
        received = sent.new_empty(sum(to_receive))
        dist.all_to_all_single(received, sent, to_receive, to_send)
        return list(received.cpu().split(to_receive))

    def any(self, flag: bool) -> bool:
        """Return whether any rank's flag is set."""
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.control)
        return bool(flags)

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.control)

    def peak_bytes(self) -> int:
        """Return the peak memory so far: of the device, or of this process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self.host_peak_bytes()

    def host_peak_bytes(self) -> int:
        """Return the peak resident memory of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def synchronize(self) -> None:
        """Wait until the device has finished its work, so that timers are correct."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def world_size_from_launcher() -> int:
    """Return the number of processes that torchrun or srun started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def give_back_memory() -> None:
    """Return the unused memory of PyTorch's allocator to the driver, for other processes."""
    torch.cuda.empty_cache()


def free_device_bytes() -> int | None:
    """Return the driver's free bytes on this process's GPU; None without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_initialized() else None


def outside_device_bytes() -> int | None:
    """Return the bytes in use on this process's GPU outside of PyTorch's allocator; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def has_gpu() -> bool:
    """Return whether this process would compute on a GPU."""
    return torch.cuda.is_available()


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


def unusable_gpus() -> Problem | None:
    """Return the problem if torch can use none of this machine's GPUs.

    An empty CUDA_VISIBLE_DEVICES hides them on purpose.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles")
    if has_gpu() or hidden or not (gpus := gpus_of_machine()):
        return None
    try:
        torch.cuda.init()
        reason = "torch.cuda.is_available() is false"
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, or a torch for CPUs
        reason = str(error).partition("\n")[0]
    kind = "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    return Problem(
        "the GPUs",
        f"{gpus} and torch {torch.__version__} for {kind}, which can use none of them ({reason})",
        "a torch for GPUs and a driver for its CUDA: 580 or newer for CUDA 13, 525 or newer for CUDA 12",
        "Update the driver, install torch for the driver's CUDA, or start the container with its GPUs. "
        "To compute on the CPU on purpose, set CUDA_VISIBLE_DEVICES='' in the environment.",
    )


def gpu_libraries() -> Libraries:
    """Return the GPU libraries that this process can use; call before importing Megatron."""
    return usable_libraries(is_on_gpu=has_gpu())


def host_bytes() -> int:
    """Return the memory of this host, or of this process's control group if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # absent, or "max"
            found.append(int(Path(file).read_text()))
    return min(found)


def num_files_left() -> int:
    """Raise this process's limit of open files as far as it may, and return how many more it can open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return _MOST_FILES if most == resource.RLIM_INFINITY else max(most - num_open, 0)


def start(num_threads: int = 1, timeout_s: float = 1800.0, join_timeout_s: float = 600.0) -> Runtime:
    """Pick the device and join the process groups: NCCL on GPUs, gloo on CPUs, and gloo for control.

    Args:
        num_threads: Number of PyTorch's threads, for computing on the CPU.
        timeout_s: Seconds that a collective waits for the other ranks before it raises.
        join_timeout_s: Seconds until all processes have joined the groups; at most `timeout_s`.
    """
    if (problem := unusable_gpus()) is not None:
        raise ConfigError(problem)
    if (num_left := num_files_left()) < _LEAST_FILES:
        raise ShortageError(
            f"this machine: found that a process may open {num_left} more files; expected {_LEAST_FILES} for "
            "connections, workers and files of a run. Raise the limit (ulimit -n), and start the same command "
            "again."
        )
    torch.set_num_threads(num_threads)
    torch.set_flush_denormal(True)
    world_size = world_size_from_launcher()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and missing:
        found, expected = f"WORLD_SIZE without {', '.join(missing)}", "all of them, as torchrun sets them"
        raise ConfigError(Problem("environment", found, expected, "Start with torchrun."))
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    # Set before CUDA starts: Megatron's collectives of a layer must run before the product that hides them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if has_gpu():
        torch.cuda.set_device(local_rank)
        device, backend = torch.device("cuda", local_rank), "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    gpu_libraries()
    _configure_logging(rank)
    timeout = timedelta(seconds=timeout_s)

    def create_groups(store: Store) -> dist.ProcessGroup:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        if not dist.is_initialized():
            store.set_timeout(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup), "of all ranks"
        return control

    if world_size == 1 or dist.is_initialized():
        control = create_groups(HashStore())
    else:
        control = join(create_groups, rank, world_size, min(timeout_s, join_timeout_s))
    return Runtime(device=device, rank=rank, world_size=world_size, control=control)


def _portable(error: Exception) -> Exception:
    """Return the exception, or one with the same message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its __reduce__ and __init__ do
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def quiet_library_warnings() -> None:
    """Silence the start-up warnings of Megatron and torch.distributed; call before importing them."""
    for module in (r"megatron\.", r"torch\.distributed"):
        warnings.filterwarnings("ignore", module=module)


def _configure_logging(rank: int) -> None:
    """Log from rank 0; other ranks log warnings and errors only."""
    mark = "" if rank == 0 else f"rank {rank} "
    logging.basicConfig(
        level=logging.WARNING, format=f"%(asctime)s {mark}%(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("megatron_dppo").setLevel(logging.INFO if rank == 0 else logging.WARNING)


def stop() -> None:
    """Leave the process group, and stop flushing denormal floats to zero."""
    torch.set_flush_denormal(False)
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Stopwatch:
    """Times the named phases of one rollout, in seconds."""

    runtime: Runtime
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def resume(cls, runtime: Runtime, seconds: Mapping[str, float]) -> "Stopwatch":
        """Continue from an earlier result of `stop`."""
        phases = {phase: elapsed for phase, elapsed in seconds.items() if phase != "total"}
        return cls(runtime, phases, time.perf_counter() - seconds.get("total", 0.0))

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the body's time to `phase`."""
        progress = self.runtime.progress
        outer, progress.phase = progress.phase, phase
        self.runtime.synchronize()
        started = time.perf_counter()
        try:
            yield
            self.runtime.synchronize()  # after an error the device may never finish,
            progress.phase = outer  # and the error's report must name this phase
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def stop(self) -> dict[str, float]:
        """Return the seconds of each phase, and "total" since the stopwatch was made."""
        return {**self.seconds, "total": time.perf_counter() - self.started}
