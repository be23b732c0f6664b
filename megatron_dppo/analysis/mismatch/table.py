"""Formats the figures of a measurement as a table, and the effect of replay as a sentence."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron_dppo.analysis.mismatch.settings import FILES
from megatron_dppo.cli_options import show_table

if TYPE_CHECKING:  # Megatron loads where it measures
    from megatron_dppo.analysis.mismatch.forwards import Measurement

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


def show(found: "Measurement", folder: Path) -> None:
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
    typer.echo("\n" + in_words(found.statistics))
    typer.echo(f"wrote {', '.join(FILES)} to {folder}")


def in_words(statistics: Mapping[Any, Mapping[str, float]]) -> str:
    """Return one sentence on the effect of replaying the routes."""
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
