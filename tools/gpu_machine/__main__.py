"""Runs everything that needs a GPU: each step with its own time limit, and a table of results at the end.

    make gpu                                           on one GPU, from a fresh clone
    make gpu-sglang                                    an SGLang server on the trainer's GPU
    python -m tools.gpu_machine --only build --only tests
    python -m tools.gpu_machine --within-s 1500        skips steps that no longer fit into this time
    python -m tools.gpu_machine --dry-run              lists steps, limits and commands; runs nothing
    python -m tools.gpu_machine --rehearse             runs small steps on a CPU, to test the commands

The steps are: facts about the machine; the build of the kernels; tests/gpu; compute-sanitizer if it is on PATH;
the losses compared with other libraries, floors and goals, one shape at a time; a gradient step with one layer
of Qwen3-30B-A3B; the loop; the quickstart with one process per device, at most two; saving. At its limit, a
step is stopped with every process that it started. The other steps run even if one fails or is stopped.

The folder --out contains results.jsonl (one line for the machine, each step and each goal), a log of each step,
and the figures that the steps wrote. The exit status is 0 if no step failed or was stopped, 1 if one was, and 2
if there is no GPU. Missed goals are listed in the table, and do not change the exit status.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tools.benchmarks.benchmarking import ROOT, cli, machine
from tools.gpu_machine.execution import Result, run_step
from tools.gpu_machine.goals import CaseGoals, case_goals, counts, lines
from tools.gpu_machine.steps import Step, chosen, gpu_steps, sglang_steps

REHEARSAL = "This is a rehearsal on small inputs: its figures are not figures of a GPU."
LEAST_S = 20.0  # a step with less time than this is left out


def main(
    sglang: Annotated[bool, typer.Option("--sglang", help="Run the steps that need SGLang on a GPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="STEP", help="Run only STEP (repeatable).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results, from the repository.")] = Path("runs/gpu"),
    within_s: Annotated[float | None, typer.Option(min=1, help="Total seconds. [default: no limit]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the steps; run nothing.")] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run small steps on a CPU.")] = False,
) -> None:
    """Run the steps, and print how each ended and what it found."""
    folder = (ROOT / out).resolve()
    os.environ["PATH"] = search_path()
    try:
        steps = (sglang_steps if sglang else gpu_steps)(folder, is_rehearsal=rehearse)
        steps = chosen(steps, only or ())
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if dry_run:
        show_plan(steps)
        return
    if not rehearse and not torch.cuda.is_available():
        typer.echo(
            "found no GPU that torch can use; expected one. --rehearse tries the commands on a CPU", err=True
        )
        raise typer.Exit(2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the step that runs is then stopped first
    results, goals = run_all(steps, folder, within_s, is_rehearsal=rehearse)
    show(results, goals, folder, is_rehearsal=rehearse)
    if len(results) < len(steps):
        typer.echo(f"interrupted in {steps[len(results)].name}: it and what comes after it was not run")
        raise typer.Exit(130)
    if any(result.outcome in ("failed", "timed out") for result in results):
        raise typer.Exit(1)


def search_path() -> str:
    """Return PATH, followed by the folders of NVIDIA's toolkit."""
    places = [str(place) for place in sorted(Path("/usr/local").glob("cuda*/bin"))]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *places])


def environment_of(*, is_rehearsal: bool) -> dict[str, str]:
    """Return the environment of the steps: the repository on the module path, and a default thread count."""
    num_threads = 1 if is_rehearsal else min(8, os.cpu_count() or 1)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"OMP_NUM_THREADS": str(num_threads)} | os.environ | own


def run_all(
    steps: Sequence[Step], folder: Path, within_s: float | None, *, is_rehearsal: bool
) -> tuple[list[Result], list[CaseGoals]]:
    """Run the steps in order, and write each result to results.jsonl when the step ends.

    Args:
        steps: Steps to run.
        folder: Absolute folder of the results. Its results.jsonl is overwritten.
        within_s: Seconds for all steps together. `None` means no limit.
        is_rehearsal: Whether results.jsonl marks the run as a rehearsal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    results: list[Result] = []
    goals: list[CaseGoals] = []
    with noting(folder / "results.jsonl") as note, suppress(KeyboardInterrupt):
        note("machine", **machine(), num_gpus=torch.cuda.device_count(), is_rehearsal=is_rehearsal)
        for step in steps:
            left_s = None if within_s is None else within_s - (time.perf_counter() - started)
            limited, shape = fitted(step, left_s), step.name.removeprefix("loss_")
            if step.figures is not None:
                step.figures.unlink(missing_ok=True)
            result = ended = left_out(limited) if limited.left_out else run(limited, folder, is_rehearsal)
            if step.figures is not None:
                cases = case_goals(shape, step.figures)
                goals += cases
                for name, goal in ((case.case, goal) for case in cases for goal in case.results):
                    note("goal", case=name, **asdict(goal))
                ended = replace(result, found=(*result.found, f"goals: {counts(cases)}"))
            results.append(ended)
            note("step", **asdict(ended), command=step.words)
            typer.echo("".join(f"    {line}\n" for line in ended.found[-12:]), nl=False)
    return results, goals


@contextmanager
def noting(file: Path) -> Iterator[Any]:
    """Open a JSON lines file, and yield a function that appends a line to it and flushes it."""
    with file.open("w", encoding="utf-8") as stream:

        def note(kind: str, **content: Any) -> None:
            stream.write(json.dumps({"kind": kind} | content) + "\n")
            stream.flush()

        yield note


def fitted(step: Step, left_s: float | None) -> Step:
    """Return the step with its limit reduced to the remaining time, or left out if that is too short."""
    if left_s is None or step.left_out:
        return step
    if left_s < LEAST_S:
        return replace(step, left_out="no time was left")
    return replace(step, limit_s=min(step.limit_s, left_s))


def left_out(step: Step) -> Result:
    """Return the result of a step that does not run."""
    typer.echo(f"\n== {step.name}: left out")
    return Result(step.name, "left out", 0.0, step.limit_s, None, (step.left_out,))


def run(step: Step, folder: Path, is_rehearsal: bool) -> Result:
    """Announce and run a step, and copy its result files to the folder."""
    log = folder / f"{step.name}.log"
    typer.echo(f"\n== {step.name}: at most {step.limit_s:.0f} s, its output in {log}")
    result = run_step(step, ROOT, log, environment_of(is_rehearsal=is_rehearsal))
    for file in step.kept:
        if result.outcome == "passed" and (ROOT / file).exists():
            shutil.copy(ROOT / file, folder / f"{step.name}_{file.name}")
    return result


def show_plan(steps: Sequence[Step]) -> None:
    """Print each step, its limit and its command."""
    for step in steps:
        why = f"  (left out: {step.left_out})" if step.left_out else ""
        typer.echo(f"{step.name:<16}{step.limit_s:>6.0f} s  {' '.join(step.words)}{why}")
    typer.echo(f"{len(steps)} steps, at most {sum(step.limit_s for step in steps) / 60:.0f} minutes")


def show(results: Sequence[Result], goals: Sequence[CaseGoals], folder: Path, *, is_rehearsal: bool) -> None:
    """Print the goals, then the table of the steps."""
    if goals:
        typer.echo(f"\ngoals of the losses: {counts(goals)}")
        typer.echo("".join(f"  {line}\n" for line in lines(goals)), nl=False)
    typer.echo(f"\n{'step':<16}{'seconds':>8}{'limit':>7}  {'ended':<11}found")
    for result in results:
        last = result.found[-1] if result.found else ""
        times = f"{result.seconds:>8.0f}{result.limit_s:>7.0f}"
        typer.echo(f"{result.name:<16}{times}  {result.ended:<11}{last[:100]}")
    bad = [result.name for result in results if result.outcome in ("failed", "timed out")]
    typer.echo(f"\n{closing(results, bad)} Logs, figures and results.jsonl are in {folder}.")
    if is_rehearsal:
        typer.echo(REHEARSAL)


def closing(results: Sequence[Result], bad: Sequence[str]) -> str:
    """Return one sentence that summarises all steps."""
    num_left_out = sum(result.outcome == "left out" for result in results)
    apart = f", {num_left_out} left out" if num_left_out else ""
    if bad:
        return f"{len(bad)} of {len(results)} steps failed or were stopped ({', '.join(bad)}){apart}."
    return f"No step failed: {len(results) - num_left_out} of {len(results)} passed{apart}."


if __name__ == "__main__":
    cli(main, __doc__)
