"""Compares our fused losses with other libraries' losses, and with floors from bytes and matrix products.

    make bench-loss
    python -m tools.benchmarks.loss --shape tp1 --shape tp8
    python -m tools.benchmarks.loss --json >figures.json
    python -m tools.benchmarks.loss --tokens 4096 --quick

On a GPU: 16384 tokens, the vocabulary of Qwen3 (151936), hidden size 2048, bfloat16. --shape tp2, tp4 or tp8
is the shard of one of 2, 4 or 8 ranks. One process emulates one rank and treats its columns as the complete
vocabulary, so no collective is timed. Without a GPU, each shape is small and runs through the PyTorch reference
of our kernels. Those figures only show that the program runs.

There are three forms. "logits": from logits, forward and backward (ours overwrites the logits with their
gradient). "linear": from hidden states and weight, forward and backward. "log_probs": the linear form without
gradient. All contenders of a case run in turns, once per round, on the same tensors. Restoring the tensors is
not timed. Milliseconds are medians (p50). "x ours" is the time divided by the time of our slowest loss of that
form. "extra MB" is the peak memory that PyTorch allocated besides the inputs, including results. In a dead row
the advantage is 0, and so is the gradient. Contenders do not know the dead rows in advance, unless the remark
mentions it.

Before the timing, each contender runs once and is compared with the exact loss and gradients in float32. "loss"
and "gradient" are relative errors. A library that is missing, fails or is inexact is listed with the reason.

The byte floor is one read of all logits in forward, and one read of live rows and one write of all rows in
backward, at the speed of a copy in the same run. The floor of the linear form is its three matrix products in
cuBLAS, one of all rows and two of the live rows, with bfloat16 results.

PyPI names of the libraries: liger-kernel, cut-cross-entropy, quack-kernels, verl. Megatron is already
installed. Figures are written to runs/bench/loss.json. With --json they are printed to standard output instead,
without any other output.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import HashStore

from megatron_dppo.runtime.process import quiet_library_warnings
from megatron_dppo.runtime.tables import show_table
from tools.benchmarks.benchmarking import OUT, ROOT, cli, machine, write_json
from tools.benchmarks.loss_baselines import baselines
from tools.benchmarks.loss_cases import SHARDS, Case, Shape
from tools.benchmarks.loss_contenders import ours_and_floors
from tools.benchmarks.loss_goals import FLOOR, GoalResult, goal_results
from tools.benchmarks.loss_rounds import Row, measure

DEAD_SHARES = (0.0, 0.3)
FORMS = {
    "logits": "from logits, forward and backward",
    "linear": "from hidden states and weight, forward and backward",
    "log_probs": "log-probs from hidden states and weight, no gradient",
}


@dataclass(frozen=True)
class Effort:
    """Numbers of warm-up rounds and of measured rounds."""

    warm_up: int
    rounds: int


GPU, CPU, QUICK = Effort(5, 25), Effort(1, 5), Effort(1, 5)


@dataclass(frozen=True)
class Figures:
    """Figures for one shape and share of dead rows."""

    shape: Shape
    dead_share: float
    copy_bytes_per_s: float
    rows: tuple[Row, ...]
    goals: tuple[GoalResult, ...]

    @property
    def byte_floor_s(self) -> float:
        """Floor of the form "logits" in seconds."""
        return floor_bytes(self.shape, self.dead_share) / self.copy_bytes_per_s

    def as_json(self) -> dict[str, Any]:
        """Return the figures with medians as JSON."""
        rows = [asdict(row) | {"median_s": row.median_s} for row in self.rows]
        derived = {"byte_floor_s": self.byte_floor_s, "rows": rows}
        return asdict(self) | derived


def main(
    shape: Annotated[
        list[str] | None, typer.Option(help="tp1, tp2, tp4 or tp8 (repeatable). [default: all]")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=8, help="Number of tokens. [default: 16384, without a GPU 512]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run 5 rounds instead of 25.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the figures, as JSON.")] = False,
    out: Annotated[Path, typer.Option(help="JSON file for the figures, from the repository.")] = OUT
    / "loss.json",
) -> None:
    """Print a table for each form of each case, and the goals."""
    unknown = [name for name in shape or () if name not in SHARDS]
    if unknown:
        typer.echo(f"--shape: found {unknown[0]!r}; expected one of {', '.join(SHARDS)}", err=True)
        raise typer.Exit(2)
    if tokens is not None and tokens % 8:
        typer.echo(f"--tokens: found {tokens}; expected a multiple of 8, which some libraries need", err=True)
        raise typer.Exit(2)
    quiet_library_warnings()
    is_gpu = torch.cuda.is_available()
    effort = QUICK if quick else GPU if is_gpu else CPU
    shapes = [
        Shape.of(name, tokens or (16384 if is_gpu else 512), is_small=not is_gpu)
        for name in dict.fromkeys(shape or SHARDS)
    ]
    device = torch.cuda.get_device_name() if is_gpu else "CPU"
    content: dict[str, Any] = {
        "machine": machine(),
        "device": device,
        "is_gpu": is_gpu,
        "kernels": "CUDA" if is_gpu else "PyTorch reference",
        "effort": asdict(effort),
        "cases": [],
    }
    if not as_json:
        typer.echo(f"{device}; our kernels: {content['kernels']}; {effort.rounds} rounds")
    with group_of_one(is_gpu):
        for one in shapes:
            for dead_share in DEAD_SHARES:
                figures = benchmark(one, dead_share, effort)
                content["cases"].append(figures.as_json())
                if not as_json:
                    show(figures)
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        write_json(ROOT / out, content)
    if any(row["is_ours"] and row["fault"] for case in content["cases"] for row in case["rows"]):
        typer.echo("one of our losses is wrong; see the table", err=True)
        raise typer.Exit(1)


@contextmanager
def group_of_one(is_gpu: bool) -> Iterator[None]:
    """Start a process group of one process. Without a GPU, disable compilation, which would take minutes."""
    stance = "default" if is_gpu else "force_eager"
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        with torch.compiler.set_stance(stance):
            yield
    finally:
        dist.destroy_process_group()


def benchmark(shape: Shape, dead_share: float, effort: Effort) -> Figures:
    """Measure all contenders on one case."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case.make(shape, dead_share, device)
    rows, speed = measure([*ours_and_floors(), *baselines()], case, effort.warm_up, effort.rounds)
    seconds = {(row.form, row.name): row.median_s for row in rows if row.median_s is not None}
    seconds["logits", FLOOR] = floor_bytes(shape, dead_share) / speed
    extra = {(row.form, row.name): row.extra_bytes for row in rows if row.extra_bytes is not None}
    goals = goal_results(seconds, extra, is_gpu=device.type == "cuda")
    return Figures(shape, dead_share, speed, tuple(rows), tuple(goals))


def floor_bytes(shape: Shape, dead_share: float) -> float:
    """Return the bytes that forward and backward from logits must move."""
    return (3 - dead_share) * shape.logits_bytes


def show(figures: Figures) -> None:
    """Print the tables and goals of a case."""
    shape = figures.shape
    typer.echo(
        f"\n== {shape.name}: {shape.num_tokens} tokens, {shape.num_columns} columns, hidden size "
        f"{shape.hidden_size}; {figures.dead_share:.0%} dead rows; a copy moves "
        f"{figures.copy_bytes_per_s / 1e9:,.1f} GB/s"
    )
    for form, title in FORMS.items():
        rows = [row for row in figures.rows if row.form == form]
        ours = max((row.median_s for row in rows if row.is_ours and row.median_s), default=None)
        cells = [cells_of(row, ours) for row in rows]
        if form == "logits":
            cells.append([FLOOR, *figure_cells(figures.byte_floor_s, ours), "", "", "", "the floor"])
        header = ("contender", "p50 ms", "x ours", "extra MB", "loss", "gradient", "remark")
        show_table(title, header, cells)
        for row in rows:
            if row.fault:
                typer.echo(f"  {row.name}: {row.fault}")
    typer.echo("\ngoals")
    for goal in figures.goals:
        figure = "" if goal.figure is None else f": {goal.figure:.2f}"
        typer.echo(f"  {goal.outcome:<13} {goal.goal}{figure}")


def cells_of(row: Row, ours: float | None) -> list[str]:
    """Return the cells of a contender."""
    if row.median_s is None:
        return [row.name, "-", "-", "-", *error_cells(row), row.remark]
    extra = "not measured" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.1f}"
    return [row.name, *figure_cells(row.median_s, ours), extra, *error_cells(row), row.remark]


def figure_cells(seconds: float, ours: float | None) -> Sequence[str]:
    """Return milliseconds, and the ratio to ours."""
    return f"{seconds * 1e3:.3f}", "-" if ours is None else f"{seconds / ours:.2f}"


def error_cells(row: Row) -> Sequence[str]:
    """Return the errors of loss and gradient."""
    return ["-" if error is None else f"{error:.0e}" for error in (row.loss_error, row.gradient_error)]


if __name__ == "__main__":
    cli(main, __doc__)
