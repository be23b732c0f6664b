"""Our fused losses against other libraries', and against what the bytes and the products alone would take.

    make bench-loss
    python -m tools.benchmarks.loss --shape tp1 --shape tp8
    python -m tools.benchmarks.loss --json >figures.json
    python -m tools.benchmarks.loss --tokens 4096 --quick

On a GPU: 16384 tokens, the vocabulary of Qwen3 (151936), hidden size 2048, bfloat16. --shape tp2, tp4 or tp8
is the shard that a rank of so many has; one process emulates one rank, as if its columns were the whole
vocabulary, so no collective is timed. Without a GPU a small shape of each, through the PyTorch reference of
our kernels: that the program runs, and nothing else, is what those figures say.

Three forms: from logits, forward and backward (ours writes the gradient over the logits); linear, from hidden
states and weight, forward and backward; log_probs, the linear form without gradient. All contenders of a case
run in turns, each once per round, on the same tensors; what restores these is not timed. Milliseconds are the
median (p50), "x ours" is how many times the slowest of ours in that form it takes. "extra MB" is the most
that PyTorch had allocated at once beside the inputs, results included. In a dead row the advantage, and with
it the gradient, is 0; nobody is told of these rows beforehand, but where it says so.

Before it is timed each is run once and compared with the exact loss and gradients in float32: "loss" and
"gradient" are relative errors. A library that is missing, fails or is off is listed with the reason.

The byte floor is one read of the logits forward, and backward one read of the live rows' and one write of
all, at the speed of a copy in the same run. The floor of the linear form is its three products in cuBLAS, one
of all rows and two of the live ones, with bfloat16 results.

Libraries, by their names on PyPI: liger-kernel, cut-cross-entropy, quack-kernels, verl; Megatron is there
already. Figures go to runs/bench/loss.json too; with --json they go to the standard output and nothing else
does.
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
    """How much is measured."""

    warm_up: int
    rounds: int


GPU, CPU, QUICK = Effort(5, 25), Effort(1, 5), Effort(1, 5)


@dataclass(frozen=True)
class Figures:
    """Of one shape and share of dead rows."""

    shape: Shape
    dead_share: float
    copy_bytes_per_s: float
    rows: tuple[Row, ...]
    goals: tuple[GoalResult, ...]

    @property
    def byte_floor_s(self) -> float:
        """Of the form from logits."""
        return floor_bytes(self.shape, self.dead_share) / self.copy_bytes_per_s

    def as_json(self) -> dict[str, Any]:
        """With medians."""
        rows = [asdict(row) | {"median_s": row.median_s} for row in self.rows]
        derived = {"byte_floor_s": self.byte_floor_s, "rows": rows}
        return asdict(self) | derived


def main(
    shape: Annotated[list[str] | None, typer.Option(help="tp1, tp2, tp4, tp8; several. [default: all]")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="[default: 16384, without a GPU 512]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="5 rounds instead of 25, to try it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON, and nothing else.")] = False,
    out: Annotated[Path, typer.Option(help="Where the figures go as JSON, from the repository.")] = OUT
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
    """A process group of this process alone, and without a GPU no compilation: it would take minutes."""
    stance = "default" if is_gpu else "force_eager"
    backend = "nccl" if is_gpu else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        with torch.compiler.set_stance(stance):
            yield
    finally:
        dist.destroy_process_group()


def benchmark(shape: Shape, dead_share: float, effort: Effort) -> Figures:
    """All contenders on one case."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case.make(shape, dead_share, device)
    rows, speed = measure([*ours_and_floors(), *baselines()], case, effort.warm_up, effort.rounds)
    seconds = {(row.form, row.name): row.median_s for row in rows if row.median_s is not None}
    seconds["logits", FLOOR] = floor_bytes(shape, dead_share) / speed
    extra = {(row.form, row.name): row.extra_bytes for row in rows if row.extra_bytes is not None}
    goals = goal_results(seconds, extra, is_gpu=device.type == "cuda")
    return Figures(shape, dead_share, speed, tuple(rows), tuple(goals))


def floor_bytes(shape: Shape, dead_share: float) -> float:
    """That forward and backward from logits must move."""
    return (3 - dead_share) * shape.logits_bytes


def show(figures: Figures) -> None:
    """Its tables and goals."""
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
    """A line of the table."""
    if row.median_s is None:
        return [row.name, "-", "-", "-", *error_cells(row), row.remark]
    extra = "not measured" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.1f}"
    return [row.name, *figure_cells(row.median_s, ours), extra, *error_cells(row), row.remark]


def figure_cells(seconds: float, ours: float | None) -> Sequence[str]:
    """Milliseconds, and how many times ours that is."""
    return f"{seconds * 1e3:.3f}", "-" if ours is None else f"{seconds / ours:.2f}"


def error_cells(row: Row) -> Sequence[str]:
    """Of loss and gradient."""
    return ["-" if error is None else f"{error:.0e}" for error in (row.loss_error, row.gradient_error)]


if __name__ == "__main__":
    cli(main, __doc__)
