"""Compares our fused losses with other libraries' losses, and with floors from bytes and matrix products.

    make bench-loss
    python -m tools.benchmarks.loss --shape tp1 --shape tp8
    python -m tools.benchmarks.loss --tokens 4096 --quick

On a GPU: 16384 tokens, the vocabulary of Qwen3 (151936), hidden size 2048, bfloat16. --shape tp2, tp4 or tp8
is the shard of one of 2, 4 or 8 ranks. One process emulates one rank and treats its columns as the complete
vocabulary, so no collective is timed. Without a GPU, small shapes and the PyTorch reference of our kernels only
show that the program runs.

Three forms: from logits, forward and backward (ours overwrites the logits with their gradient); from hidden
states and weight, forward and backward; and its log-probs without gradient. All contenders of a case run in
turns, once per round, on the same tensors. Restoring the tensors is not timed. Milliseconds are medians (p50).
"x ours" is the time divided by the time of our slowest loss of that form. "extra MB" is the peak memory that
PyTorch allocated besides the inputs, including results. In a dead row the advantage is 0, and so is the
gradient. Contenders do not know the dead rows in advance. "loss" and "gradient" are relative errors of a first
run. A library that is missing, fails or is inexact is listed with the reason.

The byte floor is one read of all logits in forward, and one read of live rows and one write of all rows in
backward, at the speed of a copy in the same run. The floor of the linear form is its three matrix products in
cuBLAS, one of all rows and two of the live rows, with bfloat16 results.

Libraries on PyPI: liger-kernel, cut-cross-entropy, verl. Figures are written to
runs/bench/loss.json.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import HashStore

from megatron_dppo.analysis.pages import show_table
from megatron_dppo.runtime.process import quiet_library_warnings
from tools.benchmarks.benchmarking import OUT, ROOT, Out, cli, in_turn, write_json
from tools.benchmarks.loss_cases import SHARDS, Case, Shape
from tools.benchmarks.loss_contenders import Contender, Function, UnavailableError, check, contenders, run

DEAD_SHARES = (0.0, 0.3)
FORMS = {
    "logits": "from logits, forward and backward",
    "linear": "from hidden states and weight, forward and backward",
    "log_probs": "log-probs from hidden states and weight, no gradient",
}
FLOOR = "copied bytes"  # the row of the byte floor
OURS = "ours, dppo_topk_kl"  # the most expensive objective
Row = dict[str, Any]  # an entry of loss.json's rows


# Largest ratio of the time of ours to the other's, or most extra MB for "memory": (form, ours, other).
GOALS = {
    ("logits", OURS, FLOOR): 1.15,
    ("logits", OURS, "memory"): 50,
    ("logits", OURS, "Megatron fused CE"): 1 / 3.5,
    ("logits", OURS, "Liger vocab-parallel CE"): 1 / 3,
    ("logits", OURS, "log_softmax + gather"): 1 / 2,
    ("logits", "ours, dppo_binary_tv", "Liger GRPO"): 1,
    ("linear", OURS, "three matrix products"): 1.25,
    ("linear", OURS, "Liger fused linear CE, TP"): 1 / 1.15,
    ("linear", OURS, "verl linear_cross_entropy"): 1 / 1.8,
    ("linear", OURS, "cut-cross-entropy, exact"): 1 / 1.2,
    ("log_probs", "ours", "Liger fused linear CE, TP"): 1,
}


def main(
    shape: Annotated[list[str], typer.Option(help="tp1, tp2, tp4 or tp8 (repeatable).")] = list(SHARDS),  # noqa: B006
    tokens: Annotated[int, typer.Option(min=0, help="Number of tokens. [0: 16384, without a GPU 512]")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Run 5 rounds instead of 25.")] = False,
    out: Out = OUT / "loss.json",
) -> None:
    """Print a table for each form of each case, and the goals."""
    unknown = [name for name in shape if name not in SHARDS]
    if unknown:
        typer.echo(f"--shape: found {unknown[0]!r}; expected one of {', '.join(SHARDS)}", err=True)
        raise typer.Exit(2)
    if tokens % 8:
        typer.echo(f"--tokens: found {tokens}; expected a multiple of 8, which some libraries need", err=True)
        raise typer.Exit(2)
    quiet_library_warnings()
    is_gpu = torch.cuda.is_available()
    warm_up, rounds = (5, 25) if is_gpu and not quick else (1, 5)
    kinds = {"kernels": "CUDA" if is_gpu else "PyTorch reference", "is_gpu": is_gpu}
    device = torch.cuda.get_device_name() if is_gpu else "CPU"
    effort = {"warm_up": warm_up, "rounds": rounds}
    content: dict[str, Any] = {"device": device, **kinds, "effort": effort, "cases": []}
    typer.echo(f"{device}; our kernels: {kinds['kernels']}; {rounds} rounds")
    with group_of_one(is_gpu):
        for name in dict.fromkeys(shape):
            one = Shape.of(name, tokens or (16384 if is_gpu else 512), is_small=not is_gpu)
            for dead_share in DEAD_SHARES:
                content["cases"].append(benchmark(one, dead_share, warm_up, rounds))
                show(content["cases"][-1])
    write_json(ROOT / out, content)
    if any(row["is_ours"] and row["fault"] for case in content["cases"] for row in case["rows"]):
        typer.echo("one of our losses is wrong; see the table", err=True)
        raise typer.Exit(1)


@contextmanager
def group_of_one(is_gpu: bool) -> Iterator[None]:
    """Start a process group of one process. Without a GPU, disable compilation, which would take minutes."""
    dist.init_process_group("nccl" if is_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with torch.compiler.set_stance("default" if is_gpu else "force_eager"):
            yield
    finally:
        dist.destroy_process_group()


def benchmark(shape: Shape, dead_share: float, warm_up: int, rounds: int) -> dict[str, Any]:
    """Measure all contenders on one case, and return its entry of loss.json."""
    case = Case.make(shape, dead_share, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rows, functions = list[Row](), dict[int, tuple[Contender, Function]]()
    for number, contender in enumerate(contenders()):
        row, function = prepare(contender, case)
        rows.append(row)
        if function is not None:
            functions[number] = contender, function

    def measure(contender: Contender, function: Function) -> float:
        inputs = contender.inputs(case)
        return seconds_of(lambda: run(contender, function, case, inputs), case)

    measures = {number: lambda one=one: measure(*one) for number, one in functions.items()}
    for number, seconds in in_turn(measures, rounds, warm_up).items():
        rows[number] |= {"seconds": seconds, "median_s": statistics.median(seconds)}
    copies = [seconds_of(case.restored, case) for _ in range(rounds + 1)][1:]
    speed = 2 * case.pristine.nbytes / statistics.median(copies)
    # Forward reads all logits, backward reads the live rows and writes all rows: two bytes each.
    floor_s = (3 - dead_share) * 2 * shape.num_tokens * shape.num_columns / speed
    medians = {(row["form"], row["name"]): row["median_s"] for row in rows if row["seconds"]}
    extra = {(row["form"], row["name"]): row["extra_bytes"] for row in rows if row["extra_bytes"] is not None}
    goals = goal_results(medians | {("logits", FLOOR): floor_s} if case.pristine.is_cuda else {}, extra)
    found = {"shape": asdict(shape), "dead_share": dead_share, "rows": rows, "goals": goals}
    return found | {"copy_bytes_per_s": speed, "byte_floor_s": floor_s}


def prepare(contender: Contender, case: Case) -> tuple[Row, Function | None]:
    """Load a contender, run it and check its result. Return its row, and the function if it can be timed."""
    is_gpu = case.pristine.is_cuda
    names = {name: getattr(contender, name) for name in ("form", "name", "is_ours", "remark")}
    row: Row = {**names, "seconds": [], "median_s": None, "extra_bytes": None, "fault": ""}
    row |= {"loss_error": None, "gradient_error": None}
    try:
        function = contender.load()
        if contender.needs_gpu and not is_gpu:
            return row | {"fault": "needs a GPU"}, None
        run(contender, function, case, contender.inputs(case))  # triggers compilation and autotuning
        inputs = contender.inputs(case)
        before = torch.cuda.memory_allocated() if is_gpu else 0
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        outcome = run(contender, function, case, inputs)
        row["extra_bytes"] = torch.cuda.max_memory_allocated() - before if is_gpu else None
        row["loss_error"], row["gradient_error"], fault = check(contender, case, *outcome)
    except UnavailableError as error:
        return row | {"fault": str(error)}, None
    except torch.OutOfMemoryError:
        return row | {"fault": "does not fit into memory"}, None
    except Exception as error:  # a failure of another library is a result
        if contender.is_ours:
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        return row | {"fault": f"fails: {type(error).__name__}: {reason}"[:160]}, None
    return (row | {"fault": f"wrong: {fault}", "extra_bytes": None}, None) if fault else (row, function)


def seconds_of(function: Callable[[], Any], case: Case) -> float:
    """Return the seconds of one run, by CUDA events on a GPU, and by the clock elsewhere."""
    if not case.pristine.is_cuda:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def goal_results(
    seconds: Mapping[tuple[str, str], float], extra_bytes: Mapping[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """Return each goal's figure, and whether it was met, missed or not measured.

    Args:
        seconds: Median seconds of each (form, name) measured on a GPU, with the byte floor under FLOOR.
        extra_bytes: Peak bytes besides the inputs of each (form, name).
    """
    results: list[dict[str, Any]] = []
    for (form, ours, other), limit in GOALS.items():
        figure, names = None, ((form, ours), (form, other))
        if other == "memory" and names[0] in extra_bytes:
            figure = extra_bytes[names[0]] / 1e6
        elif all(name in seconds for name in names):
            figure = seconds[names[0]] / seconds[names[1]]
        outcome = "not measured" if figure is None else "met" if figure <= limit else "missed"
        kind = "MB besides its inputs" if other == "memory" else f"times the time of {other}"
        goal = f"{form}: {ours}, at most {limit:.3g} {kind}"
        results.append({"goal": goal, "figure": figure, "outcome": outcome})
    return results


def show(case: dict[str, Any]) -> None:
    """Print the tables and goals of a case."""
    shape = case["shape"]
    typer.echo(
        f"\n== {shape['name']}: {shape['num_tokens']} tokens, {shape['num_columns']} columns, hidden size "
        f"{shape['hidden_size']}; {case['dead_share']:.0%} dead rows; a copy moves "
        f"{case['copy_bytes_per_s'] / 1e9:,.1f} GB/s"
    )
    for form, title in FORMS.items():
        rows = [row for row in case["rows"] if row["form"] == form]
        ours = max((row["median_s"] for row in rows if row["is_ours"] and row["seconds"]), default=None)

        def figures(seconds: float, ours: float | None = ours) -> list[str]:
            return [f"{seconds * 1e3:.3f}", "-" if ours is None else f"{seconds / ours:.2f}"]

        cells: list[list[str]] = []
        for row in rows:
            extra = "not measured" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e6:,.1f}"
            times = [*figures(row["median_s"]), extra] if row["seconds"] else ["-", "-", "-"]
            errors = (row["loss_error"], row["gradient_error"])
            shown = ["-" if error is None else f"{error:.0e}" for error in errors]
            cells.append([row["name"], *times, *shown, row["remark"]])
        if form == "logits":
            cells.append([FLOOR, *figures(case["byte_floor_s"]), "", "", "", "the floor"])
        header = ("contender", "p50 ms", "x ours", "extra MB", "loss", "gradient", "remark")
        show_table(title, header, cells)
        typer.echo("".join(f"  {row['name']}: {row['fault']}\n" for row in rows if row["fault"]), nl=False)
    typer.echo()
    for goal in case["goals"]:
        figure = "" if goal["figure"] is None else f": {goal['figure']:.2f}"
        typer.echo(f"  {goal['outcome']:<13} {goal['goal']}{figure}")
    outcomes = Counter(goal["outcome"] for goal in case["goals"])
    typer.echo("goals: " + ", ".join(f"{outcomes[name]} {name}" for name in ("met", "missed", "not measured")))


if __name__ == "__main__":
    cli(main, __doc__)
