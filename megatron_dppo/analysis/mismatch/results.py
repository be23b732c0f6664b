"""Config and results of a mismatch measurement: files, the terminal's table, the plot of pi against mu."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from torch import Tensor

from megatron_dppo.analysis.contrasts import PooledChange, pooled_change
from megatron_dppo.analysis.figures.canvas import Drawing, build, render
from megatron_dppo.analysis.pages import show_table
from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.checks import RULES, check
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.metrics.engine_comparison import MeasuredResponse, Routes, pairs, token_rows
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.run_folder.folder import json_values
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.runtime.libraries import versions
from megatron_dppo.runtime.process import Runtime, world_size_from_launcher

FILES = ("mismatch.json", "tokens.jsonl", "mismatch.html", "mismatch.toml")
OF_TRAINING_ALONE = ("minibatches", "same_experiment")
"""Rules that do not bind: no gradient steps of equal size, and no run to resume."""
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
NUM_BINS = 100  # along each axis
_TITLES: Mapping[Routes, str] = {
    "live": "live routes, of the trainer's routers",
    "replayed": "replayed routes, of the rollout (R3)",
}


def measurement_config(
    configs: Sequence[Path], overrides: Sequence[str], engine: str | None = None, prompts: int | None = None
) -> Config:
    """Return the run's config with one rollout, each token trained once, and routes if it has experts."""
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
    """Return the config with its own server in `folder`, or without one if the run's servers are used."""
    sglang = config.rollout.sglang.model_copy(update={"num_own_servers": int(is_serving)})
    rollout = config.rollout.model_copy(update={"sglang": sglang})
    run = config.run.model_copy(update={"folder": folder}) if is_serving else config.run
    return config.model_copy(update={"rollout": rollout, "run": run})


def require_possible(config: Config, folder: Path, is_serving: bool) -> None:
    """Refuse impossible measurements, before anything loads."""
    rules = {name: rule for name, rule in RULES.items() if name not in OF_TRAINING_ALONE}
    problems = check(config, world_size_from_launcher(), rules)
    if is_serving and config.rollout.engine != "sglang":
        action = "Give --engine sglang, or leave --serve out."
        problems.append(Problem("--serve", f"rollout.engine = {config.rollout.engine!r}", "'sglang'", action))
    if (folder / FILES[0]).exists():
        action = "Give another folder with -o, or remove that file."
        problems.append(Problem("--out", f"{folder}, which holds {FILES[0]}", "no measurement there", action))
    if problems:
        raise ConfigError(problems)


@dataclass(frozen=True)
class Measurement:
    """Results of a measurement, the same on every rank."""

    responses: tuple[MeasuredResponse, ...]  # in an order that no layout changes
    statistics: Mapping[Routes, Mapping[str, float]]
    counts: RolloutCounts
    seconds: Mapping[str, float]
    rounded_weights: float  # fraction of the trainer's weights that the engine's type rounds


def write(folder: Path, config: Config, found: Measurement, runtime: Runtime, fault: str | None) -> None:
    """Write the files of the output folder; mismatch.json comes last."""
    write_jsonl(folder / "tokens.jsonl", token_rows(found.responses))
    title = f"{config.model.load.name}: {config.rollout.engine} engine, {config.model.dtype} trainer"
    write_plot(folder / "mismatch.html", found.responses, list(found.statistics), title)
    change = kl_change(found.responses)
    content: dict[str, Any] = {
        "engine": config.rollout.engine,
        "num_processes": runtime.world_size,
        "num_responses": len(found.responses),
        "serves_these_weights": fault is None,
        "rounded_weights": found.rounded_weights,
        "rollout": {name.removeprefix("rollout/"): value for name, value in found.counts.metrics().items()},
        "seconds": found.seconds,
        **json_values(found.statistics),
        "replay_change": change and json_values(asdict(change)),
        "versions": versions(),
        "config": config.model_dump(mode="json"),
    }
    (folder / "mismatch.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def show(found: Measurement, folder: Path) -> None:
    """Print the table, and one sentence on replay."""
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
    typer.echo("\n" + in_words(found.statistics, kl_change(found.responses)))
    if found.rounded_weights:
        typer.echo(
            f"The engine's type rounds {found.rounded_weights:.2%} of the trainer's weights, and this gap "
            "contains the rounding. Without it: --set model.dtype=bfloat16, or measure a folder that "
            "megatron-dppo convert to-hf --dtype bfloat16 has written."
        )
    typer.echo(f"wrote {', '.join(FILES)} to {folder}")


def kl_change(responses: Sequence[MeasuredResponse]) -> PooledChange | None:
    """Return the relative change of the KL (k3) by replay, with its interval; None without replay."""
    if not responses or any("replayed" not in response.log_probs for response in responses):
        return None

    def kl_k3(routes: Routes) -> list[float]:
        log_ratios = [each.log_probs[routes].double() - each.rollout_log_probs.double() for each in responses]
        return [float((torch.expm1(log_ratio) - log_ratio).mean()) for log_ratio in log_ratios]

    num_tokens = [response.tokens.numel() for response in responses]
    return pooled_change(num_tokens, kl_k3("live"), kl_k3("replayed"))


def in_words(statistics: Mapping[Any, Mapping[str, float]], change: PooledChange | None) -> str:
    """Return one sentence on the effect of replaying the routes, with the interval of `kl_change`."""
    if "replayed" not in statistics:
        return "The model has no experts: there are no routes to replay."
    live, replayed = (statistics[routes]["kl_k3"] for routes in ("live", "replayed"))
    if not (math.isfinite(live) and math.isfinite(replayed)):
        return f"The KL (k3) is not finite: {live} with live routes, {replayed} with replayed ones."
    if live == 0:
        return f"With live routes the KL (k3) is 0: replay cannot lower it. With replay it is {replayed:.3e}."
    verb = "lowers" if replayed <= live else "raises"
    found = (
        f"Replaying the rollout's routes {verb} the KL (k3) by {abs(1 - replayed / live):.0%} on these tokens"
    )
    if change is None or not math.isfinite(change.low):
        return f"{found}."
    decided = "" if change.low > 0 or change.high < 0 else "; they do not decide the sign"
    return f"{found} (95% interval over responses: {change.low:+.0%} to {change.high:+.0%}{decided})."


def write_plot(file: Path, responses: Sequence[MeasuredResponse], kinds: Sequence[Routes], title: str) -> None:
    """Write a page that opens without a network: one panel for each way the tokens were forwarded."""
    counts = [token_counts(*pairs(responses, routes)) for routes in kinds]
    norm = LogNorm(1, max(10.0, *(float(values.max()) for values in counts)))
    panels = [
        partial(_draw_counts, counts=values, norm=norm, title=_TITLES[routes])
        for routes, values in zip(kinds, counts, strict=True)
    ]
    drawing = Drawing("mismatch", "", title, panels, (), columns=2, panel_height=3.0)
    svg = render(build(drawing), "svg").decode()
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
    file.write_text(f"{head}{svg[svg.index('<svg') :]}\n</html>\n", encoding="utf-8")


def _draw_counts(axes: Axes, counts: np.ndarray, norm: LogNorm, title: str) -> None:
    """Draw the number of tokens in each bin, and a line where pi = mu."""
    shown = np.ma.masked_less(counts, 1)
    image = axes.imshow(shown, norm=norm, origin="lower", extent=(0.0, 1.0, 0.0, 1.0), aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="tokens", format="{x:g}")
    axes.plot([0, 1], [0, 1], color="#c82828", linewidth=0.8)
    axes.set_title(title)
    axes.set_xlabel("μ, probability in the rollout")
    axes.set_ylabel("π, in the trainer")


def token_counts(log_pi: Tensor, log_mu: Tensor) -> np.ndarray:
    """Count [NUM_BINS, NUM_BINS] tokens by pi (rows) and mu (columns), equal bins from 0 to 1, without NaNs."""
    pi, mu = (log_probs.exp().clamp(max=1).numpy() for log_probs in (log_pi, log_mu))
    is_number = ~(np.isnan(pi) | np.isnan(mu))
    return np.histogram2d(pi[is_number], mu[is_number], bins=NUM_BINS, range=[[0, 1], [0, 1]])[0]
