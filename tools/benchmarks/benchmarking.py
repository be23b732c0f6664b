"""Helpers for the benchmarks: detection of disturbing programs, JSON files, and the command line."""

import json
import os
import platform
import resource
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("runs/bench")
BUSY_CORES = 0.1  # cores used by other programs above which figures are unreliable


class OtherPrograms:
    """Measures the cores used by other programs, excluding this program and its child processes."""

    def __init__(self) -> None:
        self._started, self._machine_s, self._own_s = time.perf_counter(), _machine_cpu_s(), _own_cpu_s()

    def cores(self) -> float | None:
        """Return the mean number of cores used by other programs so far, or `None` if it is unknown.

        All child processes must have ended.
        """
        now_s = _machine_cpu_s()
        if self._machine_s is None or now_s is None:
            return None
        other_s = (now_s - self._machine_s) - (_own_cpu_s() - self._own_s)
        return max(other_s, 0.0) / (time.perf_counter() - self._started)


def _own_cpu_s() -> float:
    """Return the CPU seconds of this program and of its ended child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _machine_cpu_s() -> float | None:
    """Return the busy CPU seconds of the machine, including time stolen by a hypervisor; Linux only."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def warn_if_busy(title: str, other_cores: float | None) -> None:
    """Print a warning if other programs used part of the machine."""
    if other_cores is not None and other_cores > BUSY_CORES:
        typer.echo(
            f"warning: during '{title}' other programs used {other_cores:.1f} of {os.cpu_count()} cores; "
            "expected an idle machine. Stop them and measure again."
        )


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun(python: str, num_processes: int) -> list[str]:
    """Return the beginning of a torchrun command with this many processes."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--master-addr=127.0.0.1"]
    return [python, *launcher, f"--master-port={free_port()}"]


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median and range of some values as text."""
    if not values:
        return "not reached"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def machine() -> dict[str, Any]:
    """Return facts about the machine that the figures were measured on."""
    return {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write the figures, and print the path of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    typer.echo(f"wrote {file}")


def cli(command: Any, doc: str | None) -> None:
    """Run a tool with its module's docstring as the help, with the same line breaks."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help="\b\n" + (doc or "").replace("\n\n", "\n\n\b\n"))(command)
    app()
