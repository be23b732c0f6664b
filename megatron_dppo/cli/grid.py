"""`megatron-dppo grid`: every combination of config files, settings and seeds, and a comparison."""

import json
import os
import re
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from megatron_dppo.checks import require_valid
from megatron_dppo.cli.grid_runs import GridRun, last_line, train_all
from megatron_dppo.cli.options import Overrides, user_errors
from megatron_dppo.config.load import load_config, shown
from megatron_dppo.config.resuming import change_table, experiment_changes
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.run_folder.reader import Run, read_run

app = typer.Typer()


@dataclass(frozen=True)
class Cell:
    """One combination of files and settings; it has a run for each seed."""

    name: str  # folder name
    configs: tuple[Path, ...]
    overrides: tuple[str, ...]
    varied: tuple[str, ...] = ()  # of the overrides, what --vary gave


@app.command()
def grid(
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder of the runs and the report.")],
    configs: Annotated[
        list[Path] | None, typer.Argument(metavar="CONFIG", help="TOML files that all runs have in common.")
    ] = None,
    variants: Annotated[
        list[Path] | None,
        typer.Option("--variant", metavar="CONFIG", help="A TOML file of some of the runs (repeatable)."),
    ] = None,
    varied: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="KEY=A,B,...", help="Values of one key (repeatable)."),
    ] = None,
    seeds: Annotated[str, typer.Option(metavar="0-2,7", help="Seeds of each combination.")] = "0",
    overrides: Overrides = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once on this machine.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each run, started by torchrun.")] = 1,
    script: Annotated[
        Path | None,
        typer.Option("--sbatch", metavar="SCRIPT", help="Submit this job script instead, an array for each."),
    ] = None,
    compares_only: Annotated[
        bool, typer.Option("--compare-only", help="Compare what has been run, and run nothing.")
    ] = False,
) -> None:
    r"""Run every combination of files, settings and seeds, and compare the runs.

    Three algorithms with three seeds each, two runs at a time:

        megatron-dppo grid base.toml --variant grpo.toml --variant dppo.toml \
            --variant mine.toml --seeds 0-2 --jobs 2 -o runs/study

    Two files, three thresholds:

        megatron-dppo grid base.toml --variant tv.toml --variant kl.toml \
            --vary algorithm.delta=0.05,0.1,0.2 -o runs/deltas

    The runs are DIR/COMBINATION/seed_N, each with a log DIR/COMBINATION/logs/seed_N.log. All combinations are
    checked before the first run starts. The same command skips runs that are finished, resumes the others, and
    starts what was added. A failed run does not stop the others. Ctrl-C lets the running ones save. The first
    combination is the baseline in DIR/report.html, numbers.json, numbers.csv and table.tex.

    On a cluster each combination becomes a job array for unfinished seeds, and a last job writes the report.
    The script gets the arguments: first a file in the script's folder, the algorithm, then the others:

        megatron-dppo grid my_cluster.toml --variant grpo.toml \
            --variant dppo_binary_tv.toml --seeds 0-2 \
            --sbatch examples/moe_base/train.sbatch -o runs/study

    Exit code 1: a run failed. 2: invalid arguments or config. 75: interrupted; start the same command again.
    """
    with user_errors():
        numbers = parse_seeds(seeds)
        cells = cells_of(configs or (), variants or (), varied or (), overrides or ())
        folders = [out / cell.name / f"seed_{seed}" for seed in numbers for cell in cells]
        if script is not None and not compares_only:
            _submit(script, cells, numbers, out)
            return
        failed = [] if compares_only else _train(cells, numbers, out, jobs, processes)
        begun = [folder for folder in folders if _read(folder) is not None]
        if begun:
            _compare(begun, out)
    for run in failed:
        typer.echo(f"{run.folder} failed: {last_line(run.log)}", err=True)
    if failed:
        raise typer.Exit(1)


_OWN_KEYS = {"run.seed": "--seeds", "run.folder": "-o"}


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list of numbers and ranges, such as 0-2,7."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(Problem("--seeds", repr(text), "numbers and ranges", "Write for example 0-2,7."))
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ConfigError(Problem("--seeds", repr(text), "each seed once", "Name each seed once."))
    return found


def cells_of(
    configs: Sequence[Path], variants: Sequence[Path], varied: Sequence[str], overrides: Sequence[str]
) -> list[Cell]:
    """Return the combinations, the first variant with all its values first."""
    if not configs and not variants:
        action = "Name the files that all runs have in common, or --variant FILE."
        raise ConfigError(Problem("CONFIG", "no config", "one or more", action))
    for option, text in (*(("--vary", each) for each in varied), *(("--set", each) for each in overrides)):
        key = text.partition("=")[0].strip()
        if key in _OWN_KEYS:
            expected = f"{_OWN_KEYS[key]}, from which `grid` sets this key"
            raise ConfigError(Problem(option, text, expected, f"Use {_OWN_KEYS[key]} instead."))
    files: list[tuple[str, tuple[Path, ...]]] = [(path.stem, (path,)) for path in variants]
    cells: list[Cell] = []
    for (stem, own), values in product(files or [("", ())], product(*map(_values_of, varied))):
        name = "-".join(filter(None, [stem, *(label for label, _ in values)])) or configs[-1].stem
        given = tuple(override for _, override in values)
        cells.append(Cell(name, (*configs, *own), (*overrides, *given), given))
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            action = "Name each file and value once; files of other folders need other names."
            raise ConfigError(Problem("--variant, --vary", f"{name} twice", "combinations that differ", action))
    return cells


def _values_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield a label for each value, and the value as --set takes it."""
    key, separator, values = text.partition("=")
    if not separator or not key.strip() or not values.strip():
        action = "Write for example --vary algorithm.delta=0.1,0.2."
        raise ConfigError(Problem(f"--vary {text}", repr(text), "KEY=VALUE,VALUE,...", action))
    try:
        parsed: list[Any] = tomllib.loads(f"values = [{values}]")["values"]
        given = [_as_toml(value) for value in parsed]
    except tomllib.TOMLDecodeError:  # plain words
        given = parsed = [part.strip() for part in values.split(",")]
    for value, as_set in zip(parsed, given, strict=True):
        label = re.sub(r"[^\w.+-]+", "_", f"{key.rpartition('.')[2].strip()}_{shown(value)}")
        yield label, f"{key.strip()}={as_set}"


def _as_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def _train(cells: Sequence[Cell], seeds: Sequence[int], out: Path, jobs: int, processes: int) -> list[GridRun]:
    """Check every combination, train what is unfinished, and return the runs that failed."""
    runs: list[GridRun] = []
    problems: list[Problem] = []
    for cell in cells:
        is_checked = False
        for seed in seeds:
            run = _run_of(cell, seed, out, processes)
            if not run.is_finished and not is_checked:
                is_checked = True
                try:
                    require_valid(_config_of(run), processes)
                except ConfigError as error:
                    problems += error.problems
            runs.append(run)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    by_seed = [runs[place * len(seeds) + n] for n in range(len(seeds)) for place in range(len(cells))]
    with _interruptible():
        try:
            return train_all(by_seed, jobs, gpus_for(jobs, processes))
        except KeyboardInterrupt:
            typer.echo("stopped: the runs were saved; the same command resumes them", err=True)
            raise typer.Exit(75) from None


def _run_of(cell: Cell, seed: int, out: Path, processes: int) -> GridRun:
    folder = (out / cell.name / f"seed_{seed}").absolute()
    overrides = (*cell.overrides, f"run.seed={seed}")
    try:
        config = load_config(cell.configs, [*overrides, f"run.folder={str(folder)!r}"])
    except ConfigError as error:
        given = {override: f"--vary {override}" for override in cell.varied}
        given |= {f"run.seed={seed}": f"--seeds {seed}", f"run.folder={str(folder)!r}": f"-o {out}"}
        raise ConfigError([_as_given(problem, given) for problem in error.problems]) from None
    run = GridRun(folder, cell.configs, overrides, config.run.num_rollouts, processes)
    if run.is_finished and (read := _read(folder)) is not None:
        changes = experiment_changes(read.config, config.model_dump(mode="json"))
        if changes:
            found = f"{folder}, which has finished with other settings"
            action = "Choose another folder, or remove that run."
            raise ConfigError(Problem("--out", found, "runs of this grid", action, change_table(changes)))
    return run


def _as_given(problem: Problem, given: Mapping[str, str]) -> Problem:
    """Return a problem that names the option of `grid` instead of the --set that a run gets."""
    for override, option in given.items():
        found = problem.found.replace(f"(set by --set {override})", f"(set by {option})")
        problem = replace(problem, found=found)
    return problem


def _config_of(run: GridRun) -> Any:
    return load_config(run.configs, [*run.overrides, f"run.folder={str(run.folder)!r}"])


def gpus_for(jobs: int, processes: int) -> list[str]:
    """Return the names of the GPUs that jobs of so many processes divide; none on a machine without."""
    import torch

    count = torch.accelerator.device_count()
    if count and jobs * processes > count:
        found = f"{jobs} jobs of {processes} processes"
        raise ConfigError(
            Problem("--jobs", found, f"at most {count} processes, one per GPU", "Run fewer at once.")
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and a closed terminal end the body as Ctrl-C does; `nohup` keeps SIGHUP ignored."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(folder: Path) -> Run | None:
    try:
        return read_run(folder)
    except DataError:
        return None


def _compare(folders: Sequence[Path], out: Path) -> None:
    from megatron_dppo.analysis.report.report import compare

    files = {"json": out / "numbers.json", "csv": out / "numbers.csv", "latex": out / "table.tex"}
    for sentence in compare(folders, out / "report.html", data_files=files):
        typer.echo(f"- {sentence}")
    typer.echo(f"wrote report.html, {', '.join(file.name for file in files.values())} to {out}")


def _submit(script: Path, cells: Sequence[Cell], seeds: Sequence[int], out: Path) -> None:
    """Submit a job array for each combination with unfinished seeds, and the report after them."""
    folder, report = script.parent, script.parents[1] / "slurm/report.sbatch"
    for file in (script, folder / "base.toml", report):
        if not file.is_file():
            expected, action = "a train.sbatch of examples/", "Run this in the repository's root."
            raise ConfigError(Problem("--sbatch", f"{script}, and no file {file}", expected, action))
    waiting: list[tuple[Cell, list[int]]] = []
    for cell in (_algorithm_first(cell, folder) for cell in cells):  # all are read before one is submitted
        files = (folder / "base.toml", *(folder / name for name in cell.configs[:1]), *cell.configs[1:])
        runs = [(seed, _run_of(replace(cell, configs=files), seed, out, 1)) for seed in seeds]
        waiting.append((cell, [seed for seed, run in runs if not run.is_finished]))
    environment = _environment_of_jobs(script)
    out.mkdir(parents=True, exist_ok=True)
    jobs: list[str] = []
    for cell, left in waiting:
        if not left:
            typer.echo(f"{cell.name}: finished")
            continue
        options = [f"--array={','.join(map(str, left))}", f"--job-name={cell.name}"]
        sets = [*cell.overrides, f"run.folder={_as_toml(str(out / cell.name))}"]
        arguments = [*map(str, cell.configs), *(part for text in sets for part in ("--set", text))]
        jobs.append(
            _sbatch([*options, f"--output={out}/slurm-%x-%A_%a.out", str(script), *arguments], environment)
        )
        typer.echo(f"{cell.name}: job {jobs[-1]}, seeds {', '.join(map(str, left))}")
    after = [f"--dependency=afterany:{':'.join(jobs)}"] if jobs else []
    folders = [str(out / cell.name) for cell in cells]
    arguments = [*after, f"--output={out}/slurm-%x-%j.out", str(report), str(out / "report.html"), *folders]
    job = _sbatch(arguments, {name: value for name, value in environment.items() if name not in _OF_GPUS})
    typer.echo(f"then job {job} writes {out / 'report.html'}")


def _algorithm_first(cell: Cell, folder: Path) -> Cell:
    """Return the cell with a file that the script's folder has in front, such as the algorithm of a variant."""
    own = [file for file in cell.configs if len(file.parts) == 1 and (folder / file).is_file()][:1]
    return replace(cell, configs=(*own, *(file for file in cell.configs if file not in own)))


_OF_GPUS = ("SBATCH_GPUS_PER_NODE", "SBATCH_GPUS", "SBATCH_GRES")  # not for the report
_PREPARE = """. examples/slurm/pair.sh; prepare_to_submit "$1"
for name in ${!SBATCH_@}; do printf '%s=%s\\0' "$name" "${!name}"; done"""


def _environment_of_jobs(script: Path) -> dict[str, str]:
    """Return the environment of sbatch: of a job that `grid` runs in, what jobs share, not its shape."""
    command = ["/bin/bash", "-peuc", _PREPARE, "bash", script.parent.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parents[2])
    if done.returncode:
        said = re.search("found (.*); expected (.*?)[.] (.*)", done.stderr)
        found, expected, action = said.groups() if said else (done.stderr, "the scripts of examples/slurm", "")
        raise ConfigError(Problem("--sbatch", found, expected, action))
    typer.echo(done.stderr, nl=False, err=True)
    inherited = dict(line.split("=", 1) for line in done.stdout.split("\0")[:-1])
    own = {name: v for name, v in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    return own | inherited


def _sbatch(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the job's number."""
    command = ["sbatch", "--parsable", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except FileNotFoundError:
        problem = Problem("--sbatch", "no sbatch on PATH", "SLURM's commands", "Run this on a login node.")
        raise ConfigError(problem) from None
    except subprocess.CalledProcessError as error:
        found = f"{shlex.join(command)}, which ended with {error.returncode}: {error.stderr.strip()}"
        action = "Correct its options, or SBATCH_... in the environment."
        raise ConfigError(Problem("--sbatch", found, "a job that SLURM takes", action)) from None
    return done.stdout.strip().partition(";")[0]
