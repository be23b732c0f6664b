"""Evaluates other trust regions on a run's saved mini-batches, with one forward pass, and prints a table."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from megatron_dppo.actor.actor import Actor
from megatron_dppo.algorithms import PolicyLossInputs
from megatron_dppo.analysis.what_if.measures import PolicyTokens, evaluate_variants, mismatch_by_routes
from megatron_dppo.analysis.what_if.question import Question
from megatron_dppo.checkpoints.megatron_folder import load_weights
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import read_share
from megatron_dppo.data.batches.packing import with_places
from megatron_dppo.mcore.groups import data_parallel_place, speaks_for_its_group
from megatron_dppo.metrics.engine_comparison import Routes
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.run.session import join_processes
from megatron_dppo.run_folder.folder import json_values
from megatron_dppo.runtime.files import full_disk_explained
from megatron_dppo.runtime.libraries import versions
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import Microbatch, TrainBatch


def answer(config: Config, question: Question, runtime: Runtime) -> dict[str, Any]:
    """Forward the saved tokens and evaluate the variants. All ranks call this together and get the same result.

    Args:
        config: The run's, with `model.load` naming the checkpoint to evaluate.
        question: Rollouts and variants to evaluate.
        runtime: This process.

    Returns:
        Contents of `what_if.json`: `rows` and `agreement` of `evaluate_variants`, the variants' names in that
        order, variants that were left out and why, `mismatch` by routes, and their source.
    """
    load = question.before or config.model.load
    actor = Actor(config.model_copy(update={"model": config.model.model_copy(update={"load": load})}), runtime)
    place = data_parallel_place()
    by_rollout = {number: read_share(question.batches, number - 1, place) for number in question.rollouts}
    steps = [step for own in by_rollout.values() for step in own]
    kept = [(number, m) for number, own in by_rollout.items() for step in own for m in step.microbatches]
    has_routes = any(m.routed_experts is not None for _, m in kept)
    kinds: tuple[Routes, ...] = ("live", "replayed") if has_routes else ("live",)
    old = dict[Routes, list[Tensor]]()
    if question.before is not None:
        old = {routes: _columns(actor, steps, routes, runtime) for routes in kinds}
        load_weights(actor.chunks, config.model.load, actor.hf)
    tokens = dict[Routes, PolicyTokens]()
    for routes in kinds:
        columns = _columns(actor, steps, routes, runtime, has_score_norms=True)
        own = tokens_of(kept, columns, old.get(routes)) if speaks_for_its_group() else []
        tokens[routes] = _concatenate([part for of_rank in runtime.all_gather(own) for part in of_rank])
    rows, agreement = evaluate_variants(question.variants, tokens)
    return {
        "run": str(question.run),
        "checkpoint": str(config.model.load),
        "before": None if question.before is None else str(question.before),
        "rollouts": list(question.rollouts),
        "num_tokens": tokens[kinds[0]].score_norms.numel(),
        "trained_routes": "replayed" if "replayed" in kinds and config.replays_routes else "live",
        "mismatch": mismatch_by_routes(tokens),
        "variants": [variant.name for variant in question.variants],
        "left_out": dict(question.left_out),
        "rows": rows,
        "agreement": agreement,
    }


def _columns(
    actor: Actor,
    steps: Sequence[TrainBatch],
    routes: Routes,
    runtime: Runtime,
    *,
    has_score_norms: bool = False,
) -> list[Tensor]:
    """Return the columns of each micro-batch; see `Actor.token_log_probs`."""
    options = {"is_replaying": routes == "replayed", "has_score_norms": has_score_norms}
    every = tqdm(steps, desc=f"forward, {routes} routes", unit="mini-batch", disable=not runtime.is_main)
    return [columns for step in every for columns in actor.token_log_probs(step, Metrics(), **options)]


def tokens_of(
    kept: Sequence[tuple[int, Microbatch]], columns: Sequence[Tensor], old: Sequence[Tensor] | None
) -> list[PolicyTokens]:
    """Return the learning tokens of each micro-batch.

    Args:
        kept: (rollout, from 1, and micro-batch) each.
        columns: Of each micro-batch, [T, 2 + K]: log pi of the target and of the Top-K, and the score's norm.
        old: Of each micro-batch, [T, 1 + K] of the policy before the steps; None means the saved log-probs.
    """
    found = list[PolicyTokens]()
    for place, ((rollout, m), of_pi) in enumerate(zip(kept, columns, strict=True)):
        rows = m.loss_mask.bool()
        learning, of_pi = with_places(m).rows(rows), of_pi[rows]
        has_topk = m.topk is not None and m.topk.ids.shape[1] > 0
        inputs = PolicyLossInputs.of(
            learning,
            of_pi[:, 0].clamp(max=0),
            topk_log_probs=of_pi[:, 1:-1] if has_topk else None,
            response_lengths=learning_lengths(m),
        )
        anchor = learning.old_log_probs if old is None else old[place][rows, 0]
        inputs = replace(inputs, loss_mask=None, old_log_probs=anchor)
        rollouts = torch.full_like(learning.targets, rollout, dtype=torch.long)
        found.append(PolicyTokens(inputs, of_pi[:, -1], rollouts))
    return found


def learning_lengths(m: Microbatch) -> Tensor:
    """Return [B] int64: learning tokens of each sequence of a micro-batch; its padding has none."""
    before = torch.cat([m.loss_mask.new_zeros(1, dtype=torch.long), m.loss_mask.bool().long().cumsum(0)])
    return before[m.cu_seqlens.long()].diff()


def _concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate token records field by field. A field that is `None` in one of them becomes `None`."""
    values: dict[str, Any] = {}
    for field in fields(parts[0]):
        own = [getattr(part, field.name) for part in parts]
        if any(value is None for value in own):
            values[field.name] = None
        else:
            values[field.name] = torch.cat(own) if isinstance(own[0], Tensor) else _concatenate(own)
    return replace(parts[0], **values)


def run(config: Config, question: Question, folder: Path) -> None:
    """Evaluate the question, write `what_if.json`, and print the table. Every rank of the job calls this."""
    with join_processes(config) as runtime, full_disk_explained(folder):
        found = answer(config, question, runtime)
        content = json.dumps(json_values({**found, "versions": versions()}), indent=1, allow_nan=False)
        runtime.on_main(lambda: (folder / "what_if.json").write_text(content + "\n"))
        if runtime.is_main:
            typer.echo(as_text(found))
            typer.echo(f"wrote what_if.json to {folder}")


WIDTH = 100
_CELL = 8  # columns of the terminal
_MAX_NAME = WIDTH - 9 * _CELL

Row = Mapping[str, Any]
_LEGEND = (
    "M: weight of a token's update, 0 where masked. grad. mass: sum of |M| min(r, C) |A| over that",
    "of M = 1. cosine: of the gradients by the last hidden states. at 1/2, 2x: of the main threshold.",
)


def share(value: float | None) -> str:
    """Format a share as a percentage, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{value:.2%}" if value < 0.9995 else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number to three decimals, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _mean_weight(row: Row) -> float:
    return row["weight_mean"] if "weight_mean" in row else 1.0 - row["masked_fraction"]


def _at_factor(row: Row, factor: float) -> float | None:
    return next((each["masked_fraction"] for each in row["sensitivity"] if each["factor"] == factor), None)


# Two lines of a heading, the figure of a row, and its format.
_COLUMNS: Sequence[tuple[str, str, Callable[[Row], float | None], Callable[[float | None], str]]] = (
    ("masked", "A>0", lambda row: row["masked_fraction_positive"], share),
    ("share", "A<0", lambda row: row["masked_fraction_negative"], share),
    ("mean", "M", _mean_weight, number),
    ("grad.", "mass", lambda row: row["gradient_mass_kept"], share),
    ("cosine", "no mask", lambda row: row["cosine_unmasked"], number),
    ("with", "TopK TV", lambda row: row["cosine_dppo_topk_tv"], number),
    ("agrees", "w. run", lambda row: row["agreement"], share),
    ("masked", "at 1/2", partial(_at_factor, factor=0.5), share),
    ("share", "at 2x", partial(_at_factor, factor=2.0), share),
)
_SPREAD = (
    ("masked", "share", "masked_fraction", share),
    ("grad.", "mass", "gradient_mass_kept", share),
    ("cosine", "no mask", "cosine_unmasked", number),
)


def as_text(found: Mapping[str, Any]) -> str:
    """Return one table for each kind of routes, and one with the spread over rollouts."""
    rollouts = ", ".join(map(str, found["rollouts"]))
    lines = [
        f"{found['num_tokens']:,} learning tokens of rollouts {rollouts}",
        f"weights {found['checkpoint']}",
    ]
    for routes, values in found["mismatch"].items():
        rows = [row for row in found["rows"] if row["routes"] == routes]
        lines += [
            "",
            f"{routes} routes: mean |pi-mu| {values['abs_prob_diff_mean']:.2e}  k3 {values['kl_k3']:.2e}  "
            f"pi/mu {values['ratio_min']:.3g} .. {values['ratio_max']:.3g}",
        ]
        headings = [(first, second) for first, second, *_ in _COLUMNS]
        lines += _table(rows, headings, [[form(value(row)) for *_, value, form in _COLUMNS] for row in rows])
        if len(found["rollouts"]) > 1 and routes == found["trained_routes"]:
            headings = [pair for first, second, *_ in _SPREAD for pair in ((first, "mean"), (second, "sd"))]
            cells = [[form(part) for *_, key, form in _SPREAD for part in _spread(row, key)] for row in rows]
            lines += ["", f"{routes} routes, mean and standard deviation over rollouts"]
            lines += _table(rows, headings, cells)
    if found["left_out"]:
        lines += ["", *(f"left out: {name}, {why}" for name, why in found["left_out"].items())]
    return "\n".join([*lines, "", *_LEGEND])


def _spread(row: Row, figure: str) -> tuple[float, float]:
    """Return mean and standard deviation of a figure over the rollouts that have it; NaN of none, or of one."""
    values = [each[figure] for each in row["by_rollout"] if each[figure] is not None]
    values = [value for value in values if not math.isnan(value)]
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else math.nan


def _table(
    rows: Sequence[Row], headings: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]
) -> list[str]:
    """Return the lines of a table; a name that is too long gets its own line."""
    width = min(max(len(row["variant"]) for row in rows), _MAX_NAME)
    lines = [" " * width + "".join(f"{heading[part]:>{_CELL}}" for heading in headings) for part in (0, 1)]
    for row, texts in zip(rows, cells, strict=True):
        name = row["variant"]
        if len(name) > width:
            lines.append(name)
            name = ""
        lines.append(f"{name:{width}}" + "".join(f"{text:>{_CELL}}" for text in texts))
    return [line.rstrip() for line in lines]
