"""Trust regions under pressure on a CPU: the grid of grid.toml, several seeds each, and a report.

    python examples/miniature_study/run.py --short      # four cells, two seeds: does it work?
    python examples/miniature_study/run.py --seeds 10   # the whole study takes hours: stop it, go on

Everything goes to runs/miniature_study/. What is finished is kept: ask again
for more seeds, or for a part of the grid.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from study_grid import Cell, Grid, read_grid
from study_pictures import draw_against, draw_ranked
from study_report import TITLE, write_report
from study_results import CellResult, findings, read_results

from megatron_dppo.analysis.figures.command import draw_figures
from megatron_dppo.cli.grid_runs import GridRun, last_line, train_all
from megatron_dppo.errors import MegatronDppoError

ROOT = Path(__file__).resolve().parents[2]
HERE = Path("examples/miniature_study")
QUICKSTART = Path("examples/quickstart")
MODEL = ("--layers", "2", "--experts", "8", "--experts-per-token", "2")
SHORT = {"algorithms": ["dppo_binary_tv", "pg_is"], "settings": ["too_fast", "lag_2"]}
_SHORT_ROLLOUTS, _SHORT_WARM_START = 3, 60

Names = Annotated[list[str] | None, typer.Option(help="Only these; may be given many times.")]


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell; seeds 0, 1, ...")] = 10,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once, one core each. [default: all cores]")
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each run.")] = 24,
    algorithm: Names = None,
    setting: Names = None,
    block: Names = None,
    short: Annotated[bool, typer.Option("--short", help="Four cells, two seeds, three rollouts each.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="[default: runs/miniature_study, or ..._short]")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Of what is finished; run nothing.")
    ] = False,
) -> None:
    """Run what is not finished, and write the report of what is."""
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = (out or Path(f"runs/miniature_study{'_short' if short else ''}")).resolve()
    grid = read_grid(HERE / "grid.toml")
    num_rollouts = rollouts
    if short:
        seeds, num_rollouts = 2, _SHORT_ROLLOUTS
        algorithm, setting = algorithm or SHORT["algorithms"], setting or SHORT["settings"]
    try:
        grid = grid.only(algorithm or (), setting or (), block or ())
    except MegatronDppoError as error:
        raise typer.BadParameter(str(error)) from None
    tasks = tasks_of(grid, folder, range(seeds), num_rollouts)
    failed: list[GridRun] = []
    if not report_only:
        make_model(folder / "model", _SHORT_WARM_START if short else None)
        failed = train_all(tasks, jobs or os.cpu_count() or 1)
    report(grid, folder, range(seeds), num_rollouts, failed)
    if failed:
        raise typer.Exit(1)


def make_model(folder: Path, steps: int | None) -> None:
    """The quickstart's warm start; kept while its recipe is the same."""
    flags = [*MODEL, *(["--steps", str(steps)] if steps else [])]
    command = [sys.executable, str(QUICKSTART / "make_model.py"), "--out", str(folder), *flags]
    subprocess.run(command, check=True)


def tasks_of(grid: Grid, folder: Path, seeds: Sequence[int], num_rollouts: int) -> list[GridRun]:
    """Every run, seed by seed, so that a study that is stopped early has whole seeds."""
    model = [f"model.load={str(folder / 'model')!r}", f"data.prompts={str(folder / 'model/prompts.jsonl')!r}"]
    return [
        GridRun(
            cell.folder(folder, seed),
            (HERE / "base.toml",),
            (*model, *grid.overrides(cell), f"run.seed={seed}"),
            num_rollouts,
        )
        for seed in seeds
        for cell in grid.cells
    ]


def report(
    grid: Grid, folder: Path, seeds: Sequence[int], num_rollouts: int, failed: Sequence[GridRun]
) -> None:
    """Write report.md, report.html and summary.json, and show the words."""
    results = read_results(grid, folder, seeds, num_rollouts)
    found = findings(grid, results)
    finished = sum(len(result.runs) for result in results.values())
    facts = [
        f"{finished} of {len(grid.cells) * len(seeds)} runs have finished, of {num_rollouts} rollouts each.",
        *(f"{task.folder} failed: {last_line(task.log)}" for task in failed),
    ]
    write_report(folder, grid, results, found, facts)
    (folder / "summary.json").write_text(json.dumps(summary(results), indent=1) + "\n")
    draw(grid, folder, results)
    for finding in found:
        typer.echo(f"- {finding.expectation.text}: {finding.outcome}")
    typer.echo(f"wrote report.html, report.md and summary.json to {folder}")


def draw(grid: Grid, folder: Path, results: Mapping[Cell, CellResult]) -> None:
    """The paper's figures of the finished runs and the blocks' own, in figures/; none without such runs."""
    runs = [cell.folder(folder, run.seed) for cell, result in results.items() for run in result.runs]
    if runs:
        written = draw_figures(runs, folder / "figures", title=TITLE)
        typer.echo(f"wrote {len(written.names)} figures and index.html to {folder / 'figures'}")
    for block in grid.blocks:
        if block.against is not None:
            draw_against(block, block.against, grid, results, folder / "figures")
        if block.is_ranked:
            draw_ranked(block, results, folder / "figures")


def summary(results: Mapping[Cell, CellResult]) -> dict[str, object]:
    """Every run's figures, for other programs."""
    return {
        str(cell): [
            {"seed": run.seed, "is_collapsed": run.is_collapsed, "rewards": run.rewards, **_finite(run.figures)}
            for run in result.runs
        ]
        for cell, result in results.items()
    }


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


if __name__ == "__main__":
    typer.run(main)
