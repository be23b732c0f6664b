"""Analysis commands of `megatron-dppo`: compare, figures, what-if, measure-mismatch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_dppo.cli.options import Configs, Overrides, RemovedRuleOptions, user_errors
from megatron_dppo.runtime.process import gpu_libraries, quiet_library_warnings, world_size_from_launcher

app = typer.Typer()

TokensAt = Annotated[
    int | None,
    typer.Option(
        "--tokens-at",
        min=1,
        metavar="ROLLOUT",
        help="Rollout (from 1) of the masked tokens to show. [default: the last one that all runs list]",
    ),
]


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, one or more.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The report to write.")] = Path("report.html"),
    watch: Annotated[
        bool, typer.Option("--watch", help="Rewrite the report until the runs have ended, or Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between updates of --watch.")] = 10.0,
    tokens_at: TokensAt = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write every number as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write every number as CSV.")] = None,
    latex: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a LaTeX table (booktabs).")
    ] = None,
) -> None:
    """Overlay several runs in one HTML report.

    The report starts with findings, which are also printed: one sentence per question, and whether the runs
    decide it. The command reads only the run folders, and the report opens without a network:

        megatron-dppo compare runs/no_replay runs/replay -o report.html

        megatron-dppo compare runs/no_replay runs/replay --watch

    With --watch the page reloads in the browser and keeps its scroll position.

    --json, --csv and --latex also write every number, with its 95 % interval and number of seeds. The first
    setting is the baseline of the differences:

        megatron-dppo compare runs/grpo/seed_* runs/dppo/seed_* --latex table.tex --json numbers.json

    Runs with tracking.clipped_tokens_every also show the tokens that their masks dropped most often, in one
    rollout:

        megatron-dppo compare runs/clipped_tokens/grpo_clip_higher --tokens-at 50
    """
    with user_errors():
        from megatron_dppo.analysis.report.report import compare as write_report
        from megatron_dppo.analysis.report.report import watch as write_reports

        forms = {"json": json, "csv": csv, "latex": latex}
        files = {form: file for form, file in forms.items() if file is not None}
        if watch:
            found = write_reports(runs, out, every, typer.echo, tokens_at=tokens_at, data_files=files)
        else:
            found = write_report(runs, out, tokens_at=tokens_at, data_files=files)
    for sentence in found:
        typer.echo(f"- {sentence}")
    typer.echo(f"wrote {', '.join(map(str, (out, *files.values())))}")


@app.command()
def figures(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, and output folders of measure-mismatch.")
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", metavar="DIR", help="Output folder for figures, captions and index.html."),
    ] = Path("figures"),
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="png|svg", help="File format (repeatable). [default: both]"),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of every figure and of the gallery.")] = "",
    tokens_at: TokensAt = None,
    mu_axis: Annotated[
        Literal["linear", "log"],
        typer.Option(help="Axis of mu in 02_engine_differences; the paper's is linear."),
    ] = "linear",
) -> None:
    """Draw the paper's figures for these runs, with captions and a gallery.

    Runs that differ only in run.seed become one line with an interval. Labels show the settings that differ:

        megatron-dppo figures runs/moe_base/*/ runs/moe_base_r3/*/ -o figures

        megatron-dppo figures runs/stability/*/seed_* --format svg --title "tiny model"

    Runs may still be in progress. A figure without data is left out, and the command prints the settings that
    record it. The gallery, DIR/index.html, opens without a network.
    """
    with user_errors():
        from megatron_dppo.analysis.figures.command import draw_figures, formats_of

        is_log = mu_axis == "log"
        known = formats_of(formats or ())
        written = draw_figures(folders, out, known, title, tokens_at, is_mu_logarithmic=is_log)
    if written.not_drawn:
        names = ", ".join(sentence.partition(" ")[0] for sentence in written.not_drawn)
        typer.echo(f"not drawn, for want of data: {names} (index.html lists the settings to change)", err=True)
    typer.echo(f"wrote {len(written.names)} figures and index.html to {out}")


@app.command(name="what-if")
def what_if(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with saved mini-batches.")],
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Checkpoint to evaluate. [default: the run's newest]")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Weights that sampled the rollouts, for anchor = recomputed."),
    ] = None,
    rollouts: Annotated[
        list[str] | None,
        typer.Option(
            "--rollout", metavar="N|all", help="Saved rollouts, from 1 (repeatable). [default: the last]"
        ),
    ] = None,
    presets: Annotated[
        list[str] | None,
        typer.Option("--preset", help="A preset, or module:function (repeatable). [default: the run's]"),
    ] = None,
    every_preset: Annotated[
        bool, typer.Option("--all", help="All presets with saved inputs; others are listed.")
    ] = False,
    rule_options: RemovedRuleOptions = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="FIELD=VALUE,...", help="Values to try for a field (repeatable)."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="[default: RUN/what_if]")
    ] = None,
) -> None:
    """Compare trust regions on a run's saved mini-batches: masked tokens and remaining gradient.

    Nothing is sampled. The tokens saved by tracking.batches_every are forwarded once with a checkpoint's
    weights, with live and with replayed routes if the rollout has routes, and each variant masks them:

        megatron-dppo what-if runs/r3 --preset grpo --preset dppo_topk_tv --sweep delta=0.05,0.1,0.2

        megatron-dppo what-if runs/r3 --all --rollout all --before runs/r3/checkpoints/step_00000040

        megatron-dppo what-if runs/r3 --preset my_rules:fades_out --sweep rule_options.delta=0.1,0.2

    It prints a table, and what_if.json has all numbers. Set options of a custom rule with
    --sweep rule_options.delta=0.2, and its divergence with --sweep rule_divergence=topk_tv.

    Run it in one process, for a job of any size, or under torchrun with the run's layout.
    """
    with user_errors():
        from megatron_dppo.analysis.what_if.question import question_of

        folder = out or run / "what_if"
        config, question = question_of(
            run,
            folder,
            world_size_from_launcher(),
            checkpoint=checkpoint,
            before=before,
            rollouts=rollouts or (),
            presets=presets or (),
            is_all=every_preset,
            sweeps=sweeps or (),
            overrides=overrides or (),
        )
        quiet_library_warnings()
        gpu_libraries()
        from megatron_dppo.analysis.what_if.answer import run as ask

        ask(config, question, folder)


@app.command()
def measure_mismatch(
    configs: Configs,
    overrides: Overrides = None,
    engine: Annotated[
        Literal["transformers", "sglang"] | None,
        typer.Option(help="Engine. [default: rollout.engine]"),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts to sample. [default: rollout.prompts_per_rollout]")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Start an SGLang server for the measurement.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="[default: run.folder/mismatch]")
    ] = None,
) -> None:
    """Measure how far the trainer's policy pi is from the engine's mu for the same weights, before training.

        megatron-dppo measure-mismatch base.toml --prompts 64

        megatron-dppo measure-mismatch base.toml --engine sglang --serve

        torchrun --nproc-per-node 2 -m megatron_dppo measure-mismatch base.toml --set parallel.tensor=2

    The engine samples responses to the run's first prompts with the weights of model.load. Then the trainer
    forwards the same tokens in the layout of [parallel], once with live routes and once with the rollout's
    routes replayed (R3). Nothing is trained. The two columns of the table differ only by replay.

    Read the tails: the mean of |pi - mu| hides the few tokens that cause harmful updates. A trust region with
    a threshold below the TV's 99.9th percentile masks noise. k1 and k3 both estimate KL(mu || pi); k3 has
    less noise. The agreement is the fraction of the rollout's experts that the trainer's routers choose too,
    after live or after replayed earlier layers.

    With --engine sglang the servers in the run's servers/ are used. Start them with megatron-dppo serve and
    this config. They have the weights of model.load, or receive the trainer's. --serve starts a server for the
    measurement, in the output folder. On a GPU it shares the trainer's device: set
    sglang.mem_fraction_static.

    The output folder gets mismatch.json (all numbers, the config and versions), tokens.jsonl (one response per
    line: log mu, live and replayed log pi of each token), mismatch.html (plots of pi against mu) and
    mismatch.toml (the resolved config). A folder with a finished measurement is refused. Exit code 2: the
    engine does not serve these weights, because they differ as much as two models.
    """
    with user_errors():
        from megatron_dppo.analysis.mismatch.results import measurement_config, require_possible, with_servers

        config = measurement_config(configs, overrides or (), engine, prompts)
        folder = out or config.run.folder / "mismatch"
        config = with_servers(config, folder, serve)
        require_possible(config, folder, serve)
        quiet_library_warnings()
        gpu_libraries()
        from megatron_dppo.analysis.mismatch.measure import run as measure

        measure(config, folder)
