"""How far the trainer's policy pi stands from the engine's mu for the same weights, before any training.

    python tools/measure_mismatch.py base.toml --prompts 64
    python tools/measure_mismatch.py base.toml --engine sglang --serve
    torchrun --nproc-per-node 2 tools/measure_mismatch.py base.toml --set parallel.tensor=2

The run's own parts are used: the engine samples responses to the run's first prompts with the weights of
model.load, then the trainer forwards the same tokens in the layout of [parallel], once with its live routes
and once with those of the rollout replayed (R3). Nothing is trained. Both forwards see the same tokens, so what
differs between the two columns of the table is what replay changes.

Read the tails: a mean of |pi - mu| hides the few tokens on which an update goes wrong. A trust region whose
threshold lies below the TV's 99.9th percentile masks noise. k1 and k3 both estimate KL(mu || pi); k3 has little
noise. The agreement is the share of the rollout's experts that the trainer's own routers choose too: with live
routes after what they chose before, with replayed routes after the replayed layers before them.

With --engine sglang the servers are those of the run's servers/, started with megatron-dppo serve and this
config; they must still hold the weights of model.load. --serve starts one for the time of the measurement, in
the output folder. On a GPU it shares the trainer's device: set sglang.mem_fraction_static.

Written to the output folder: mismatch.json (all figures, the config and versions), tokens.jsonl (a response per
line: log mu, log pi live and replayed of each token), mismatch.html (pi against mu; opens in a browser) and
mismatch.toml (the resolved config). A folder that holds a finished measurement is refused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from benchmarking import cli, show_table

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.checks import RULES, check
from megatron_dppo.cli import Configs, Overrides
from megatron_dppo.config.load import dump_config, load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, MegatronDppoError, Problem
from megatron_dppo.runtime.process import Runtime, gpu_libraries, quiet_library_warnings
from megatron_dppo.runtime.process import world_size_from_launcher as world_size

if TYPE_CHECKING:  # Megatron loads after the config was checked
    from mismatch_forwards import Measurement

FILES = ("mismatch.json", "tokens.jsonl", "mismatch.html", "mismatch.toml")
OF_TRAINING_ALONE = (
    "minibatches",
    "sglang_weight_sync",
)  # gradient steps of equal size; weights are not pushed
_ROWS: Sequence[tuple[str, str, str]] = (
    ("|pi - mu| of a token, mean", "abs_prob_diff_mean", "{:.3e}"),
    ("  99.9th percentile", "tv_p999", "{:.3e}"),
    ("  largest", "tv_max", "{:.3e}"),
    ("TV over the rollout's top-K, mean", "topk_tv_mean", "{:.3e}"),
    ("  largest", "topk_tv_max", "{:.3e}"),
    ("KL(mu || pi), k1", "kl_k1", "{:+.3e}"),
    ("  k3", "kl_k3", "{:.3e}"),
    ("|log pi - log mu|, mean", "log_prob_diff_mean", "{:.3e}"),
    ("  largest", "log_prob_diff_max", "{:.3e}"),
    ("pi / mu, smallest", "ratio_min", "{:.6g}"),
    ("  0.1th percentile", "ratio_p001", "{:.6g}"),
    ("  1st percentile", "ratio_p01", "{:.6g}"),
    ("  median", "ratio_p50", "{:.6g}"),
    ("  99th percentile", "ratio_p99", "{:.6g}"),
    ("  99.9th percentile", "ratio_p999", "{:.6g}"),
    ("  largest", "ratio_max", "{:.6g}"),
    ("experts agreed on, all layers", "agreement_mean", "{:.4%}"),
)


def main(
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
    """Measure the mismatch of engine and trainer."""
    try:
        config = measured_config(configs, overrides or (), engine, prompts)
        folder = out or config.run.folder / "mismatch"
        config = with_servers(config, folder, serve)
        require_possible(config, folder, serve)
        quiet_library_warnings()
        gpu_libraries()
        run(config, folder)
    except MegatronDppoError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None


def measured_config(
    configs: Sequence[Path], overrides: Sequence[str], engine: str | None = None, prompts: int | None = None
) -> Config:
    """The run's config with what a measurement sets: one rollout, each token once, routes where there are any.

    Raises:
        ConfigError: The files or overrides have faults, or model.load has no config.json.
    """
    given = [*overrides, *([f"rollout.engine={engine}"] if engine else [])]
    given += [f"rollout.prompts_per_rollout={prompts}"] if prompts else []
    config = load_config(configs, given)
    routes = "measure" if read_model_sizes(config.model.load).num_experts else "off"
    return load_config(
        configs,
        [
            *given,
            f"rollout.routing_replay={routes}",
            "algorithm.epochs_per_rollout=1",
            "optimizer.warmup_steps=0",
        ],
    )


def with_servers(config: Config, folder: Path, is_serving: bool) -> Config:
    """The config with a server of its own in `folder`, or with none: those of the run are somebody else's."""
    sglang = config.rollout.sglang.model_copy(update={"num_own_servers": int(is_serving)})
    rollout = config.rollout.model_copy(update={"sglang": sglang})
    run = config.run.model_copy(update={"folder": folder}) if is_serving else config.run
    return config.model_copy(update={"rollout": rollout, "run": run})


def require_possible(config: Config, folder: Path, is_serving: bool) -> None:
    """Refuse what cannot work, before anything loads.

    Raises:
        ConfigError: With every problem.
    """
    rules = {name: rule for name, rule in RULES.items() if name not in OF_TRAINING_ALONE}
    problems = check(config, world_size(), rules)
    if is_serving and config.rollout.engine != "sglang":
        action = "Give --engine sglang, or leave --serve out."
        problems.append(Problem("--serve", f"rollout.engine = {config.rollout.engine!r}", "'sglang'", action))
    if (folder / FILES[0]).exists():
        action = "Give another folder with -o, or remove that file."
        problems.append(Problem("--out", f"{folder}, which holds {FILES[0]}", "no measurement there", action))
    if problems:
        raise ConfigError(problems)


def run(config: Config, folder: Path) -> None:
    """Measure, write, and show; every rank of the job calls this.

    Raises:
        MegatronDppoError: What a run raises too; with several ranks the job ends instead.
    """
    from mismatch_forwards import measure
    from mismatch_servers import require_usable_servers

    from megatron_dppo.rollout.sglang.own_servers import own_servers
    from megatron_dppo.run.session import joined_processes

    with joined_processes(config) as runtime:
        runtime.on_main(lambda: _begin(config, folder))
        with own_servers(config, runtime):
            if config.rollout.engine == "sglang":
                runtime.on_main(lambda: require_usable_servers(config))
            found = measure(config, runtime)
        runtime.on_main(lambda: write(folder, config, found, runtime))
        if runtime.is_main:
            show(found, folder)


def _begin(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mismatch.toml").write_text(dump_config(config))


def write(folder: Path, config: Config, found: "Measurement", runtime: Runtime) -> None:
    """The files of the output folder; mismatch.json comes last."""
    from megatron_dppo.analysis.report.mismatch_plot import write_plot
    from megatron_dppo.metrics.token_mismatch import token_rows
    from megatron_dppo.run_folder.folder import json_number
    from megatron_dppo.run_folder.versions import versions
    from megatron_dppo.runtime.jsonl import write_jsonl

    write_jsonl(folder / "tokens.jsonl", token_rows(found.responses))
    title = f"{config.model.load.name}: {config.rollout.engine} engine, {config.model.dtype} trainer"
    write_plot(folder / "mismatch.html", found.responses, list(found.statistics), title)
    content: dict[str, Any] = {
        "engine": config.rollout.engine,
        "num_processes": runtime.world_size,
        "num_responses": len(found.responses),
        "rollout": {name.removeprefix("rollout/"): value for name, value in found.counts.metrics().items()},
        "seconds": found.seconds,
        **{
            routes: {name: json_number(value) for name, value in values.items()}
            for routes, values in found.statistics.items()
        },
        "versions": versions(),
        "config": config.model_dump(mode="json"),
    }
    (folder / "mismatch.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def show(found: "Measurement", folder: Path) -> None:
    """The table, and one sentence on replay."""
    kinds = list(found.statistics)
    layers = sorted(
        (name for name in found.statistics["live"] if name.startswith("agreement_layer_")),
        key=lambda name: int(name.rpartition("_")[2]),
    )
    rows = [*_ROWS, *((f"  layer {name.rpartition('_')[2]}", name, "{:.4%}") for name in layers)]
    table = [
        [label, *(form.format(found.statistics[routes][name]) for routes in kinds)]
        for label, name, form in rows
        if name in found.statistics["live"]
    ]
    num_tokens = int(found.statistics["live"]["num_tokens"])
    title = f"{num_tokens:,} tokens of {len(found.responses):,} responses"
    show_table(title, ["", *(f"{routes} routes" for routes in kinds)], table)
    typer.echo("\n" + in_words(found.statistics))
    typer.echo(f"wrote {', '.join(FILES)} to {folder}")


def in_words(statistics: Mapping[Any, Mapping[str, float]]) -> str:
    """What replaying the routes changed."""
    if "replayed" not in statistics:
        return "The model has no experts: there are no routes to replay."
    live, replayed = (statistics[routes]["kl_k3"] for routes in ("live", "replayed"))
    if not (math.isfinite(live) and math.isfinite(replayed)):
        return f"The KL (k3) is not finite: {live} with live routes, {replayed} with replayed ones."
    if live == 0:
        return (
            f"With live routes the KL (k3) is 0: nothing is left for replay, with which it is {replayed:.3e}."
        )
    verb = "lowers" if replayed <= live else "raises"
    return (
        f"Replaying the rollout's routes {verb} the KL (k3) by {abs(1 - replayed / live):.0%} on these tokens."
    )


if __name__ == "__main__":
    cli(main, __doc__)
