"""Runs everything that needs a GPU: each step with its own time limit, and a table of results at the end.

    make gpu                                           on one GPU, from a fresh clone
    make gpu-sglang                                    an SGLang server on the trainer's GPU
    python -m tools.gpu_machine --only build --only tests
    python -m tools.gpu_machine --within-s 1500        skips steps that no longer fit into this time
    python -m tools.gpu_machine --dry-run              lists steps, limits and commands; runs nothing
    python -m tools.gpu_machine --rehearse             runs small steps on a CPU, to test the commands

At its limit, a step is stopped with every process that it started. The other steps run even if one fails or is
stopped. The folder --out contains results.jsonl (a line for the machine and for each step), a log of each step,
and the figures that the steps wrote. The exit status is 0 if no step failed or was stopped, 1 if one was, and 2
if there is no GPU. Missed goals of the losses do not change the exit status.
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from tools.benchmarks.benchmarking import ROOT, cli, machine
from tools.gpu_machine.execution import Result, run_step
from tools.gpu_machine.steps import Step, gpu_steps, sglang_steps

REHEARSAL = "This is a rehearsal on small inputs: its figures are not figures of a GPU."
LEAST_S = 20.0  # a step with less time than this is left out


def main(
    sglang: Annotated[bool, typer.Option("--sglang", help="Run the steps that need SGLang on a GPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(metavar="STEP", help="Run only STEP (repeatable).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results, from the repository.")] = Path("runs/gpu"),
    within_s: Annotated[float, typer.Option(min=1, help="Seconds for all steps.")] = float("inf"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the steps; run nothing.")] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="Run small steps on a CPU.")] = False,
) -> None:
    """Run the steps, and print how each ended and what it found."""
    folder = (ROOT / out).resolve()
    toolkits = [str(place) for place in sorted(Path("/usr/local").glob("cuda*/bin"))]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *toolkits])
    steps = (sglang_steps if sglang else gpu_steps)(folder, is_rehearsal=rehearse)
    known = [step.name for step in steps]
    if unknown := set(only or ()) - set(known):
        typer.echo(f"--only: found {unknown.pop()!r}; expected one of {', '.join(known)}", err=True)
        raise typer.Exit(2)
    steps = [step for step in steps if not only or step.name in only]
    if dry_run:
        for step in steps:
            typer.echo(f"{step.name:<16}{step.limit_s:>6.0f} s  {step.left_out or ' '.join(step.words)}")
        return
    if not rehearse and not torch.cuda.is_available():
        typer.echo("found no GPU for torch; expected one. --rehearse tries the commands on a CPU", err=True)
        raise typer.Exit(2)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the step that runs is then stopped first
    results = run_all(steps, folder, within_s, is_rehearsal=rehearse)
    bad = [result.name for result in results if result.outcome in ("failed", "timed out")]
    show(results, bad, folder, is_rehearsal=rehearse)
    if len(results) < len(steps):
        typer.echo(f"interrupted in {steps[len(results)].name}: it and what comes after it was not run")
        raise typer.Exit(130)
    if bad:
        raise typer.Exit(1)


def run_all(steps: Sequence[Step], folder: Path, within_s: float, *, is_rehearsal: bool) -> list[Result]:
    """Run the steps in order, and write each result to results.jsonl when the step ends."""
    folder.mkdir(parents=True, exist_ok=True)
    started, results = time.perf_counter(), list[Result]()
    with (folder / "results.jsonl").open("w", encoding="utf-8") as file, suppress(KeyboardInterrupt):
        facts = {"kind": "machine", **machine(), "num_gpus": torch.cuda.device_count()}
        print(json.dumps(facts | {"is_rehearsal": is_rehearsal}), file=file, flush=True)
        for step in steps:
            left_s = within_s - (time.perf_counter() - started)
            why = step.left_out or ("no time was left" if left_s < LEAST_S else "")
            limited = replace(step, limit_s=min(step.limit_s, left_s))
            if why:
                typer.echo(f"\n== {step.name}: left out")
                results.append(Result(step.name, "left out", 0.0, step.limit_s, None, (why,)))
            else:
                results.append(run(limited, folder, is_rehearsal=is_rehearsal))
            row = {"kind": "step", **asdict(results[-1]), "command": step.words}
            print(json.dumps(row), file=file, flush=True)
            typer.echo("".join(f"    {line}\n" for line in results[-1].found[-12:]), nl=False)
    return results


def run(step: Step, folder: Path, *, is_rehearsal: bool) -> Result:
    """Announce and run a step with the repository on its module path, and copy its files to the folder."""
    log = folder / f"{step.name}.log"
    typer.echo(f"\n== {step.name}: at most {step.limit_s:.0f} s, its output in {log}")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": "1" if is_rehearsal else str(min(8, os.cpu_count() or 1))}
    own = {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = run_step(step, ROOT, log, threads | os.environ | own)
    for name in step.kept:
        if result.outcome == "passed" and (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / f"{step.name}_{Path(name).name}")
    return result


def show(results: Sequence[Result], bad: Sequence[str], folder: Path, *, is_rehearsal: bool) -> None:
    """Print the table of the steps, and a sentence that summarises them."""
    typer.echo(f"\n{'step':<16}{'seconds':>8}{'limit':>7}  {'ended':<11}found")
    for result in results:
        ended = result.outcome if result.exit_status is None else f"exit {result.exit_status}"
        last = result.found[-1] if result.found else ""
        times = f"{result.seconds:>8.0f}{result.limit_s:>7.0f}"
        typer.echo(f"{result.name:<16}{times}  {ended:<11}{last[:100]}")
    num_left_out, failed = sum(result.outcome == "left out" for result in results), ", ".join(bad) or "none"
    typer.echo(f"\n{len(results)} steps; left out: {num_left_out}; failed or stopped: {failed}. See {folder}.")
    if is_rehearsal:
        typer.echo(REHEARSAL)


if __name__ == "__main__":
    cli(main, __doc__)
