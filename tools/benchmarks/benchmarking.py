"""Parts of the benchmarks: rounds, detection of disturbing programs, JSON files, the command line."""

import json
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from torch.distributed.elastic.utils.distributed import get_free_port

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("runs/bench")
Out = Annotated[Path, typer.Option(help="JSON file for the figures, from the repository.")]
BUSY_CORES = 0.1  # cores used by other programs above which figures are unreliable


def in_turn(
    measures: Mapping[Any, Callable[[], float]], num_rounds: int, num_warm_up: int = 1
) -> dict[Any, list[float]]:
    """Return the results of each measure. All run once per round, and each round starts with the next one."""
    found: dict[Any, list[float]] = {name: [] for name in measures}
    order = deque(measures)
    for _ in range(num_warm_up + num_rounds):
        for name in order:
            found[name].append(measures[name]())
        order.rotate(-1)
    return {name: values[num_warm_up:] for name, values in found.items()}


class OtherPrograms:
    """Measures the cores used by other programs, excluding this program and its child processes."""

    def __init__(self) -> None:
        self._started, self._busy_s = time.perf_counter(), self._other_s()

    def cores(self) -> float:
        """Return the mean number of cores that other programs used, without this one's descendants."""
        return max(self._other_s() - self._busy_s, 0.0) / (time.perf_counter() - self._started)

    def _other_s(self) -> float:
        machine, this = psutil.cpu_times()._asdict(), psutil.Process()
        idle = ("idle", "iowait", "guest", "guest_nice")  # guests are also counted as user
        own = 0.0
        for process in (this, *this.children(recursive=True)):  # each with its children that have ended
            with suppress(psutil.Error):
                own += sum(s for kind, s in process.cpu_times()._asdict().items() if kind != "iowait")
        return sum(seconds for kind, seconds in machine.items() if kind not in idle) - own


def warn_if_busy(title: str, other_cores: float) -> None:
    """Print a warning if other programs used part of the machine."""
    if other_cores > BUSY_CORES:
        typer.echo(
            f"warning: during '{title}' other programs used {other_cores:.1f} of {os.cpu_count()} cores; "
            "expected an idle machine. Stop them and measure again."
        )


def torchrun(python: str, num_processes: int) -> list[str]:
    """Return the beginning of a torchrun command with this many processes."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--master-addr=127.0.0.1"]
    return [python, *launcher, f"--master-port={get_free_port()}"]


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median and range of some values as text."""
    if not values:
        return "not reached"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def machine() -> dict[str, Any]:
    """Return facts about the machine that the figures were measured on."""
    return {"platform": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write facts about the machine and the figures, and print the path of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")
    typer.echo(f"wrote {file}")


def cli(command: Any, doc: str | None) -> None:
    """Run a tool with its module's docstring as the help, with the same line breaks."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help="\b\n" + (doc or "").replace("\n\n", "\n\n\b\n"))(command)
    app()
