"""The command `megatron-dppo`."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megatron_dppo.checks import check as find_problems
from megatron_dppo.checks import not_checked, require_evaluable, require_valid
from megatron_dppo.config.load import dump_config, load_config
from megatron_dppo.errors import ConfigError, MegatronDppoError, Problem
from megatron_dppo.plan import Machine, Options, as_json, as_text, make_plan, parse_bytes
from megatron_dppo.plan.options import Granularity, LayerSpec, LossFrom, Moments
from megatron_dppo.runtime import gpu_libraries, quiet_library_warnings, world_size_from_launcher

app = typer.Typer(
    name="megatron-dppo",
    help="Reinforcement-learning post-training of MoE language models with Divergence PPO.",
    epilog="Start with: megatron-dppo check CONFIG, which loads no model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Configs = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG", help="TOML files; a later one overrides an earlier one, key by key."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be given many times."),
]


def main() -> None:
    """Run the command line."""
    app()


@app.command()
def train(
    configs: Configs,
    overrides: Overrides = None,
    rollout_only: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only sample, and keep the gradient steps in DIR.")
    ] = None,
    train_only: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Only train, on what --rollout-only kept in DIR.")
    ] = None,
) -> None:
    """Train a model, as the config says.

    One process per GPU (or per CPU rank), started by torchrun or srun:

        megatron-dppo train base.toml dppo.toml

        torchrun --nproc-per-node 2 -m megatron_dppo train ep2.toml

    A run folder that holds a checkpoint is gone on with, unless checkpoint.resume is false. SIGTERM and SIGUSR1
    save the run and end it with status 75: start the same command again. Errors in what you gave end with 2.

    --rollout-only and --train-only run one half of the loop, to find out which one goes wrong. Give each a
    run.folder of its own.
    """
    with _user_errors():
        config = load_config(configs, overrides or ())
        if rollout_only is not None and train_only is not None:
            action = "Run the command twice."
            raise ConfigError(Problem("--rollout-only", "--train-only too", "one of them", action))
        require_valid(config, world_size_from_launcher())
        quiet_library_warnings()
        gpu_libraries()
        if rollout_only is not None:
            from megatron_dppo.halves import roll_out_only

            roll_out_only(config, rollout_only)
        elif train_only is not None:
            from megatron_dppo.halves import train_only as train_on

            train_on(config, train_only)
        else:
            from megatron_dppo.train import main as run

            run(config)


@app.command()
def check(
    configs: Configs,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes to check for. [default: WORLD_SIZE, or 1]"),
    ] = None,
) -> None:
    """Print the resolved config and all its problems.

    Loads no model and no Megatron; exits with 1 when there is a problem.

        megatron-dppo check base.toml dppo.toml --set optimizer.lr=2e-6

        megatron-dppo check ep2.toml --world-size 2
    """
    try:
        config = load_config(configs, overrides or ())
    except ConfigError as error:
        _exit_with_problems([str(problem) for problem in error.problems])
    typer.echo(dump_config(config))
    for note in not_checked(config):
        typer.echo(f"not checked: {note}", err=True)
    problems = find_problems(config, world_size or world_size_from_launcher())
    if problems:
        _exit_with_problems([str(problem) for problem in problems])
    typer.echo("no problems found", err=True)


@app.command()
def plan(
    configs: Configs,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of the trainer, over all nodes.")],
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="SIZE", help="Of each GPU: 80GB (80e9 bytes), 79.6GiB, ...")
    ],
    overrides: Overrides = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", metavar="SIZE", help="Of each node. [default: not judged]")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs that NVLink connects.")] = 8,
    recompute: Annotated[
        Granularity | None,
        typer.Option(
            help="In the place of megatron.recompute_granularity. [default: as configured; proposals vary it]"
        ),
    ] = None,
    offload_optimizer: Annotated[
        bool,
        typer.Option("--offload-optimizer", help="Adam and its states on the host; the trainer cannot yet."),
    ] = False,
    moments: Annotated[
        Moments, typer.Option(help="Type of Adam's moments; below float32: a precision-aware optimizer.")
    ] = "float32",
    separate_engine: Annotated[
        bool, typer.Option("--separate-engine", help="SGLang has GPUs of its own, which are not counted.")
    ] = False,
    layer_spec: Annotated[
        LayerSpec, typer.Option(help="Modules of the layers: ours (torch), or Transformer Engine's (te).")
    ] = "torch",
    loss_from: Annotated[
        LossFrom | None,
        typer.Option(help="In the place of algorithm.loss_from: logits of some tokens at a time, or of all."),
    ] = None,
    proposals: Annotated[int, typer.Option(min=0, help="Layouts to propose, of each kind.")] = 5,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, bytes throughout.")] = False,
) -> None:
    """Say how much memory a run takes, whether it fits, and which layouts would.

    Reads the config and the config.json of model.load; no weights are needed, and no GPU:

        megatron-dppo plan base.toml --gpus 8 --gpu-memory 80GB

        megatron-dppo plan base.toml --gpus 16 --gpu-memory 80GB --json

    The worst rank is counted at five moments: at the loss, in backward, in the optimizer's step, in a rollout
    and while weights go to the engine. Exits with 0 when the configured layout fits, with 1 when it does not,
    and with 2 for errors in what you gave.
    """
    with _user_errors():
        given = [] if loss_from is None else [f"algorithm.loss_from={loss_from}"]
        config = load_config(configs, [*(overrides or ()), *given])
        host_bytes = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
        made = make_plan(
            config,
            Machine(gpus, parse_bytes(gpu_memory, "--gpu-memory"), host_bytes, gpus_per_node),
            Options(offload_optimizer=offload_optimizer, moments=moments, layer_spec=layer_spec),
            recompute=recompute,
            is_engine_separate=separate_engine,
        )
    typer.echo(
        json.dumps(as_json(made, proposals), indent=2) if is_json else as_text(made, proposals), nl=is_json
    )
    if not made.fits:
        raise typer.Exit(1)


@app.command()
def serve(
    configs: Configs,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="Of the server, among those of the run.")] = "server",
) -> None:
    """Start an SGLang server for a run, keep it running, and register it in run.folder/servers.

    It serves model.load with the arguments of [sglang], until SIGTERM or SIGINT:

        megatron-dppo serve base.toml --set sglang.python=.venv-sglang/bin/python

    A server that ends by itself is started again, rollout.sglang.max_restarts times; its log is
    servers/NAME.log. Clients must know the key in $MEGATRON_DPPO_SGLANG_API_KEY, where there is one.
    """
    with _user_errors():
        config = load_config(configs, overrides or ())
        from megatron_dppo.rollout.sglang.server import Server, plan_launch, supervise

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
        typer.Option(metavar="DIR", help="Of a run: RUN/checkpoints/step_... [default: model.load]"),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another Hugging Face folder or Megatron checkpoint.")
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Gets metrics.json and every response.")
    ] = Path("evaluation"),
) -> None:
    """Evaluate a model or a checkpoint on the config's evaluation sets, without training.

        megatron-dppo evaluate base.toml -o base_model

        megatron-dppo evaluate base.toml --checkpoint runs/dppo/checkpoints/step_00000320 -o step_320

    It needs the config's [model], [rollout], [data] and [evaluation], and no data.prompts; under torchrun the
    prompts are spread over the processes. Of a checkpoint it draws what the run draws in its evaluation after
    as many rollouts. Started again, it keeps the sets that were finished, unless weights or settings differ.
    """
    with _user_errors():
        if checkpoint is not None and model is not None:
            raise ConfigError(Problem("--checkpoint", "--model too", "one of them", "Run the command twice."))
        folder = checkpoint or model
        load = [] if folder is None else [f"model.load={json.dumps(str(folder))}"]
        config = load_config(configs, [*(overrides or ()), *load])
        require_evaluable(config, world_size_from_launcher())
        quiet_library_warnings()
        gpu_libraries()
        from megatron_dppo.evaluate import as_table, finished_rollouts
        from megatron_dppo.evaluate import evaluate as run

        results = run(config, out, finished_rollouts(checkpoint) if checkpoint is not None else 0)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(as_table(results))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, one or more.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The report to write.")] = Path("report.html"),
) -> None:
    """Overlay several runs in one HTML report.

    It needs nothing but the run folders, and opens in a browser without a network:

        megatron-dppo compare runs/no_replay runs/replay -o report.html
    """
    with _user_errors():
        from megatron_dppo.diagnostics.report import compare as write_report

        write_report(runs, out)
    typer.echo(f"wrote {out}")


@app.command()
def figures(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, and those of tools/measure_mismatch.py.")
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Gets the figures, captions and index.html.")
    ] = Path("figures"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="png|svg", help="Many times. [default: both]")
    ] = None,
    title: Annotated[str, typer.Option(help="Stands over every figure and over the gallery.")] = "",
) -> None:
    """Draw the paper's figures of runs, with captions, and a gallery of them.

    Runs that differ in run.seed alone are one line with an interval; what else tells them apart, their own
    configs say:

        megatron-dppo figures runs/moe_base/*/ runs/moe_base_r3/*/ -o figures

        megatron-dppo figures runs/stability/*/seed_* --format svg --title "tiny model"

    Runs may still be going on. A figure that these runs lack the data of is left out, and the command says what
    to set. The gallery, DIR/index.html, opens without a network.
    """
    with _user_errors():
        from megatron_dppo.figures.command import draw_figures, formats_of

        written = draw_figures(folders, out, formats_of(formats or ()), title)
    for sentence in written.not_drawn:
        typer.echo(f"not drawn: {sentence}", err=True)
    typer.echo(f"wrote {len(written.names)} figures and index.html to {out}")


@app.command(name="what-if")
def what_if(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that kept mini-batches.")],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights to ask. [default: the run's newest checkpoint]")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Weights that sampled the rollouts, for anchor = recomputed."),
    ] = None,
    rollouts: Annotated[
        list[int] | None, typer.Option("--rollout", help="Of those kept; many times. [default: the last]")
    ] = None,
    presets: Annotated[
        list[str] | None, typer.Option("--preset", help="Another algorithm; many times. [default: the run's]")
    ] = None,
    sweeps: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="FIELD=VALUE,...", help="Of the presets; many times.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="[default: RUN/what_if]")
    ] = None,
) -> None:
    """Ask what other trust regions would have masked in a run's mini-batches.

    No engine samples: the tokens that tracking.batches_every kept are forwarded once with the weights of a
    checkpoint, with live and with replayed routes where the rollout has them, and each variant judges them:

        megatron-dppo what-if runs/r3 --preset grpo --preset dppo_topk_tv --sweep delta=0.05,0.1,0.2

        megatron-dppo what-if runs/r3 --before runs/r3/checkpoints/step_00000040 --preset minirl

    One process reads the batches of any job; torchrun with the run's layout does, too.
    """
    with _user_errors():
        from megatron_dppo.what_if.question import question_of

        config, question = question_of(
            run,
            checkpoint=checkpoint,
            before=before,
            rollouts=rollouts or (),
            presets=presets or (),
            sweeps=sweeps or (),
            overrides=overrides or (),
            world_size=world_size_from_launcher(),
        )
        quiet_library_warnings()
        gpu_libraries()
        from megatron_dppo.what_if.answer import run as ask

        ask(config, question, out or run / "what_if")


def _exit_with_problems(problems: list[str]) -> NoReturn:
    noun = "problem" if len(problems) == 1 else "problems"
    typer.echo(f"{len(problems)} {noun}:", err=True)
    for problem in problems:
        typer.echo(f"- {problem}", err=True)
    raise typer.Exit(1)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Errors made for users end as a message and status 2; each rank finds the same faults in a config."""
    try:
        yield
    except MegatronDppoError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not isinstance(error, ConfigError):
            prefix = "" if rank == "0" else f"rank {rank}: "
            typer.echo(f"{prefix}{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
