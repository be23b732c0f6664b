"""Commands for runs: train, check, plan, serve, evaluate."""

import gc
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megatron_dppo import checks
from megatron_dppo import plan as planning
from megatron_dppo.checks.notes import lines_of, summary
from megatron_dppo.cli.options import (
    AcceptChanges,
    Assumptions,
    Configs,
    GpuMemory,
    Gpus,
    HostMemory,
    MeasuredRun,
    Overrides,
    RatesFile,
    RemovedTrace,
    RemovedTraceLayers,
    SplitGpus,
    user_errors,
)
from megatron_dppo.config.load import dump_config, load_config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.process import gpu_libraries, quiet_library_warnings, world_size_from_launcher

app = typer.Typer()


@app.command()
def train(
    configs: Configs,
    overrides: Overrides = None,
    rollout_only: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only sample, and save the mini-batches in DIR.")
    ] = None,
    train_only: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Only train, on the mini-batches of --rollout-only in DIR."),
    ] = None,
    accepts_changes: AcceptChanges = False,
) -> None:
    """Train a model.

    One process per GPU (or per CPU rank), started by torchrun or srun:

        megatron-dppo train base.toml dppo.toml

        torchrun --nproc-per-node 2 -m megatron_dppo train ep2.toml

    A run folder that contains a checkpoint is resumed, unless checkpoint.resume is false. Settings that would
    make it another experiment (algorithm, data, reward, model, sampling, learning rate) are then refused unless
    you add --accept-changes. SIGTERM, SIGUSR1, Ctrl-C and a closed terminal save the run and end it with
    status 75: start the same command again. A second Ctrl-C ends it at once, without saving. Exit code 1:
    processes, servers or the network failed; the same command may succeed. 2: an error of yours, such as
    invalid arguments or config.

    --rollout-only and --train-only run one half of the loop, to isolate a fault. Use a separate run.folder for
    each.
    """
    with user_errors():
        config = load_config(configs, overrides or ())
        if rollout_only is not None and train_only is not None:
            action = "Run the command twice."
            raise ConfigError(Problem("--rollout-only", "--train-only too", "one of them", action))
        checks.require_valid(config, world_size_from_launcher(), accepts_changes=accepts_changes)
        quiet_library_warnings()
        gpu_libraries()
        if rollout_only is not None:
            from megatron_dppo.single_phase import rollout_only as roll_out

            roll_out(config, rollout_only, accepts_changes=accepts_changes)
        elif train_only is not None:
            from megatron_dppo.single_phase import train_only as train_on

            train_on(config, train_only, accepts_changes=accepts_changes)
        else:
            from megatron_dppo.train import main as run

            gc.freeze()  # searching half a million imported objects for garbage took 10 % of a small run's time
            run(config, accepts_changes=accepts_changes)


@app.command()
def check(
    configs: Configs,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes to check for. [default: WORLD_SIZE, or 1]"),
    ] = None,
    accepts_changes: AcceptChanges = False,
    is_verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every setting first, as TOML.")
    ] = False,
) -> None:
    """Validate a config and summarize the run, without loading a model.

        megatron-dppo check base.toml dppo.toml --set optimizer.lr=2e-6

        megatron-dppo check ep2.toml --world-size 2

    It reads every row of the prompt files with the model's tokenizer, tries rewards and environments in
    separate processes, writes and removes a test folder next to the run's, and compares the settings with the
    run that would be resumed. Exit code 1: a problem was found.
    """
    try:
        config = load_config(configs, overrides or ())
    except ConfigError as error:
        _exit_with_problems(error.problems)
    if is_verbose:
        typer.echo(dump_config(config))
    facts = checks.gather_facts(
        config, world_size or world_size_from_launcher(), accepts_changes=accepts_changes
    )
    problems = checks.problems_of(config, facts)
    typer.echo(summary(config, facts))
    notes = checks.not_checked(config)
    for note in notes:
        typer.echo(f"not checked: {note}", err=True)
    for note in checks.version_notes(config):
        typer.echo(f"untested version: {note}", err=True)
    noted = [
        *checks.remarks(config),
        *checks.idle_remarks(config),
        *checks.period_remarks(config),
        *checks.doubts(config, facts),
    ]
    noted += [
        *checks.folder_remarks(config),
        *checks.stop_remarks(config, facts),
        *planning.offload_remarks(config, facts),
    ]
    noted += planning.load_remarks(config, facts)
    for remark in noted:
        typer.echo(f"note: {remark}", err=True)
    if problems:
        _exit_with_problems(problems)
    typer.echo(f"no problems found{' in what was checked' if notes else ''}", err=True)


@app.command()
def plan(
    configs: Configs,
    gpus: Gpus,
    gpu_memory: GpuMemory,
    overrides: Overrides = None,
    host_memory: HostMemory = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node, connected by NVLink.")] = 8,
    rates: RatesFile = None,
    proposals: Annotated[int, typer.Option(min=0, help="Maximum number of fitting layouts to show.")] = 5,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, bytes throughout.")] = False,
    split: SplitGpus = None,
    measured: MeasuredRun = None,
    assume: Assumptions = None,
    trace: RemovedTrace = False,
    trace_layers: RemovedTraceLayers = None,
) -> None:
    """Check whether a run fits on this many GPUs, and list the layouts that do.

    Reads the config and the config.json of model.load. It needs no weights and no GPU:

        megatron-dppo plan base.toml --gpus 16 --gpu-memory 80GB

    Times use the speeds that tools.gpu_machine measured, if runs/gpu/rates.json is there or --rates names the
    file, and otherwise those that one H200 measured.

    Settings that cost or save memory are the config's keys, as for train: optimizer.offload=true,
    algorithm.loss_from=logits, rollout.sglang.colocated=false, a table [megatron] with recompute_granularity.

    The plan refuses what check refuses, except for files and libraries. It computes the worst rank's memory
    at five moments, and warns if SGLang may retract responses (--assume response_tokens=3000). It
    lists fitting layouts with --set options, or the smallest sufficient number of GPUs. Times are estimates.

    --split divides a number of GPUs between servers and training, and estimates the gain of sampling during
    training (rollout.max_staleness):

        megatron-dppo plan base.toml --gpus 16 --gpu-memory 80GB --split 32 --assume serving_rate=2000

    Exit code 0: the configured run is accepted and fits. 1: it does not. 2: invalid arguments or config. The
    result of --split does not change the exit code.
    """
    with user_errors():
        config = load_config(configs, overrides or ())
        host_bytes = None if host_memory is None else planning.parse_bytes(host_memory, "--host-memory")
        gpu_bytes = planning.parse_bytes(gpu_memory, "--gpu-memory")
        machine = planning.Machine(gpus, gpu_bytes, host_bytes, gpus_per_node, planning.read_rates(rates))
        if measured is not None:
            machine = planning.measured_machine(machine, measured)
        given = planning.parse_assumptions(assume or ())
        if split is None and set(given) - {"response_tokens"}:
            raise ConfigError(Problem("--assume", "no --split", "one", "Add --split 32, the number of GPUs."))
        made = planning.make_plan(config, machine, given.get("response_tokens"))
        shown, text = planning.as_json(made, proposals), planning.as_text(made, proposals)
        if split is not None:
            found = planning.divide(made.job, split, given)
            shown, text = (
                shown | {"split": planning.split_as_json(found)},
                f"{text}\n{planning.split_as_text(found)}",
            )
    typer.echo(json.dumps(shown, indent=2) if is_json else text, nl=is_json)
    if not made.fits:
        raise typer.Exit(1)


@app.command()
def serve(
    configs: Configs,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="Name of the server, unique in the run.")] = "server",
) -> None:
    """Start an SGLang server for a run, keep it running, and register it in run.folder/servers.

    It serves model.load with the arguments of [sglang], until SIGTERM or SIGINT:

        megatron-dppo serve base.toml --set sglang.python=.venv-sglang/bin/python

    A server that exits unexpectedly is restarted up to rollout.sglang.max_restarts times. Its log is
    servers/NAME.log, readable by its owner only. If MEGATRON_DPPO_SGLANG_API_KEY is set, clients must send this
    key; if sglang.host admits other machines, it must be set.
    """
    with user_errors():
        config = load_config(configs, overrides or ())
        from megatron_dppo.engines.sglang.server import Server, plan_launch, supervise

        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        options = config.rollout.sglang
        server = Server(plan_launch(config), config.run.folder / "servers", name)
        supervise(server, ended, start_timeout_s=options.start_timeout_s, max_restarts=options.max_restarts)


@app.command()
def evaluate(
    configs: Configs,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint of a run: RUN/checkpoints/step_... [default: model.load]"),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another Hugging Face folder or Megatron checkpoint.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="DIR", help="Output folder for metrics.json and all responses."),
    ] = Path("evaluation"),
) -> None:
    """Evaluate a model or a checkpoint on the config's evaluation sets, without training.

        megatron-dppo evaluate base.toml -o base_model

        megatron-dppo evaluate base.toml --checkpoint runs/dppo/checkpoints/step_00000320 -o step_320

    It needs the config's [model], [rollout], [data] and [evaluation], but no data.prompts. Under torchrun the
    prompts are divided among the processes. The random draws for a checkpoint equal the run's own evaluation
    after the same number of rollouts. Started again, it keeps the results of finished sets, and logs it, unless
    weights, settings, the package's version or a file that the reward, environment or agent has read differ.
    """
    with user_errors():
        if checkpoint is not None and model is not None:
            raise ConfigError(Problem("--checkpoint", "--model too", "one of them", "Run the command twice."))
        if checkpoint is not None and not checkpoint.exists():
            found, action = f"{checkpoint}, which does not exist", "Name one: RUN/checkpoints/step_..."
            raise ConfigError(Problem("--checkpoint", found, "a checkpoint of a run", action))
        folder = checkpoint or model
        load = [] if folder is None else [f"model.load={json.dumps(str(folder))}"]
        # 0 turns off the evaluation of training; this command always evaluates.
        config = load_config(configs, [*(overrides or ()), *load, "evaluation.every=1"])
        checks.require_evaluable(config, world_size_from_launcher())
        quiet_library_warnings()
        gpu_libraries()
        from megatron_dppo.evaluate import as_table, finished_rollouts
        from megatron_dppo.evaluate import evaluate as run

        results = run(config, out, finished_rollouts(checkpoint) if checkpoint is not None else 0)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(as_table(results))


def _exit_with_problems(problems: Sequence[Problem]) -> NoReturn:
    for line in lines_of(problems):
        typer.echo(line, err=True)
    raise typer.Exit(1)
