"""Commands of `megatron-dppo` that train nothing: compare, figures, what-if, measure-mismatch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_dppo.cli.options import Configs, Overrides, user_errors
from megatron_dppo.runtime.process import gpu_libraries, quiet_library_warnings, world_size_from_launcher

app = typer.Typer()

TokensAt = Annotated[
    int | None,
    typer.Option(
        "--tokens-at",
        min=1,
        metavar="ROLLOUT",
        help="Show masked tokens of this rollout, from 1. [default: the last that all runs list]",
    ),
]


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, one or more.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The report to write.")] = Path("report.html"),
    watch: Annotated[
        bool, typer.Option("--watch", help="Rewrite the report until the runs have ended, or Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two looks of --watch.")] = 10.0,
    tokens_at: TokensAt = None,
) -> None:
    """Overlay several runs in one HTML report.

    It opens with findings, which are printed as well: one sentence for each question that the runs can answer,
    and whether they decide it. It needs nothing but the run folders, and opens in a browser without a network:

        megatron-dppo compare runs/no_replay runs/replay -o report.html

        megatron-dppo compare runs/no_replay runs/replay --watch

    With --watch the page in the browser reloads itself, and stays where it was scrolled to.

    Runs with tracking.clipped_tokens_every also show the tokens that their masks dropped most often, in one
    rollout:

        megatron-dppo compare runs/clipped_tokens/grpo_clip_higher --tokens-at 50
    """
    with user_errors():
        from megatron_dppo.analysis.report.report import compare as write_report
        from megatron_dppo.analysis.report.watch import watch as write_reports

        if watch:
            found = write_reports(runs, out, every, typer.echo, tokens_at=tokens_at)
        else:
            found = write_report(runs, out, tokens_at=tokens_at)
    for sentence in found:
        typer.echo(f"- {sentence}")
    typer.echo(f"wrote {out}")


@app.command()
def figures(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders, and those of measure-mismatch.")
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Gets the figures, captions and index.html.")
    ] = Path("figures"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="png|svg", help="Many times. [default: both]")
    ] = None,
    title: Annotated[str, typer.Option(help="Is written over every figure and over the gallery.")] = "",
    tokens_at: TokensAt = None,
    mu_axis: Annotated[
        Literal["linear", "log"], typer.Option(help="Of 02_engine_differences; linear in the paper.")
    ] = "linear",
) -> None:
    """Draw the paper's figures of runs, with captions, and a gallery of them.

    Runs that differ in run.seed alone are one line with an interval; what else tells them apart, their own
    configs say:

        megatron-dppo figures runs/moe_base/*/ runs/moe_base_r3/*/ -o figures

        megatron-dppo figures runs/stability/*/seed_* --format svg --title "tiny model"

    Runs may still be going on. A figure that these runs lack the data of is left out, and the command says what
    to set. The gallery, DIR/index.html, opens without a network.
    """
    with user_errors():
        from megatron_dppo.analysis.figures.command import draw_figures, formats_of

        is_log = mu_axis == "log"
        known = formats_of(formats or ())
        written = draw_figures(folders, out, known, title, tokens_at, is_mu_logarithmic=is_log)
    if written.not_drawn:
        names = ", ".join(sentence.partition(" ")[0] for sentence in written.not_drawn)
        typer.echo(f"not drawn, for want of data: {names} (index.html says what to set)", err=True)
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
        list[str] | None,
        typer.Option("--rollout", metavar="N|all", help="Kept rollouts, from 1. [default: the last]"),
    ] = None,
    presets: Annotated[
        list[str] | None,
        typer.Option("--preset", help="A preset, or module:function; many times. [default: the run's]"),
    ] = None,
    every_preset: Annotated[
        bool, typer.Option("--all", help="All presets whose inputs were kept; the others are named.")
    ] = False,
    rule_options: Annotated[
        str, typer.Option(metavar="NAME=VALUE,...", help="Of rules of your own. [default: the run's]")
    ] = "",
    sweeps: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="FIELD=VALUE,...", help="Of the presets; many times.")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="[default: RUN/what_if]")
    ] = None,
) -> None:
    """Compare trust regions on a run's mini-batches: what each masks, and what it leaves of the gradient.

    No engine samples: the tokens that tracking.batches_every kept are forwarded once with the weights of a
    checkpoint, with live and with replayed routes where the rollout has them, and each variant masks them:

        megatron-dppo what-if runs/r3 --preset grpo --preset dppo_topk_tv --sweep delta=0.05,0.1,0.2

        megatron-dppo what-if runs/r3 --all --rollout all --before runs/r3/checkpoints/step_00000040

        megatron-dppo what-if runs/r3 --preset my_rules:fades_out --sweep rule_options.delta=0.1,0.2

    A table is printed; what_if.json has all figures, what_if.html shows them in a browser. Options of a rule of
    your own are --rule-options delta=0.2, or swept; its divergence is --sweep rule_divergence=topk_tv.

    One process reads the batches of any job; torchrun with the run's layout does, too.
    """
    with user_errors():
        from megatron_dppo.analysis.what_if.question import Asked, question_of

        folder = out or run / "what_if"
        asked = Asked(
            run,
            folder,
            checkpoint=checkpoint,
            before=before,
            rollouts=rollouts or (),
            presets=presets or (),
            is_all=every_preset,
            sweeps=sweeps or (),
            rule_options=rule_options,
            overrides=overrides or (),
        )
        config, question = question_of(asked, world_size_from_launcher())
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
        typer.Option(help="In the place of rollout.engine. [default: as configured]"),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts to sample. [default: rollout.prompts_per_rollout]")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Start an SGLang server for the time of the measurement.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="[default: run.folder/mismatch]")
    ] = None,
) -> None:
    """Measure how far the trainer's policy pi is from the engine's mu for the same weights, before training.

        megatron-dppo measure-mismatch base.toml --prompts 64

        megatron-dppo measure-mismatch base.toml --engine sglang --serve

        torchrun --nproc-per-node 2 -m megatron_dppo measure-mismatch base.toml --set parallel.tensor=2

    The run's own parts are used: the engine samples responses to the run's first prompts with the weights of
    model.load, then the trainer forwards the same tokens in the layout of [parallel], once with its live routes
    and once with those of the rollout replayed (R3). Nothing is trained. Both forwards see the same tokens, so
    what differs between the two columns of the table is what replay changes.

    Read the tails: a mean of |pi - mu| hides the few tokens on which an update goes wrong. A trust region whose
    threshold lies below the TV's 99.9th percentile masks noise. k1 and k3 both estimate KL(mu || pi); k3 has
    little noise. The agreement is the share of the rollout's experts that the trainer's own routers choose too:
    with live routes after what they chose before, with replayed routes after the replayed layers before them.

    With --engine sglang the servers are those of the run's servers/, started with megatron-dppo serve and this
    config. They hold the weights of model.load, or none yet: those get the trainer's. --serve starts one for
    the time of the measurement, in the output folder. On a GPU it shares the trainer's device: set
    sglang.mem_fraction_static.

    Written to the output folder: mismatch.json (all figures, the config and versions), tokens.jsonl (a response
    per line: log mu, log pi live and replayed of each token), mismatch.html (pi against mu; opens in a browser)
    and mismatch.toml (the resolved config). A folder that holds a finished measurement is refused. The command
    ends with 2 if the engine does not serve these weights: if both differ as two models do.
    """
    with user_errors():
        from megatron_dppo.analysis.mismatch.settings import measured_config, require_possible, with_servers

        config = measured_config(configs, overrides or (), engine, prompts)
        folder = out or config.run.folder / "mismatch"
        config = with_servers(config, folder, serve)
        require_possible(config, folder, serve)
        quiet_library_warnings()
        gpu_libraries()
        from megatron_dppo.analysis.mismatch.measure import run as measure

        measure(config, folder)
