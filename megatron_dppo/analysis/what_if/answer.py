"""Evaluates other trust regions on a run's kept mini-batches, with one forward pass."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from megatron_dppo.actor.actor import Actor
from megatron_dppo.algorithms import PolicyLossInputs
from megatron_dppo.analysis.what_if.measures import (
    PolicyTokens,
    TokensByRoutes,
    evaluate_variants,
    mismatch_by_routes,
)
from megatron_dppo.analysis.what_if.question import Question
from megatron_dppo.analysis.what_if.results import as_text, page
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
    numbers = [number for number, own in by_rollout.items() for step in own for _ in step.microbatches]
    has_routes = any(m.routed_experts is not None for step in steps for m in step.microbatches)
    kinds: tuple[Routes, ...] = ("live", "replayed") if has_routes else ("live",)
    old: list[dict[Routes, Tensor]] | None = None
    if question.before is not None:
        old = _columns(actor, steps, kinds, "before", runtime)
        load_weights(actor.chunks, config.model.load, actor.hf)
    columns = _columns(actor, steps, kinds, "forward", runtime, has_score_norms=True)
    own = _learning(steps, numbers, columns, old, kinds)
    parts = [part for of_rank in runtime.all_gather(own) for part in of_rank]
    tokens: TokensByRoutes = {routes: _concatenate([part[routes] for part in parts]) for routes in kinds}
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


def write(folder: Path, found: Mapping[str, Any]) -> None:
    """Write `what_if.json` and `what_if.html`. The page opens without a network."""
    (folder / "what_if.html").write_text(page(found), encoding="utf-8")
    content = json_values({**found, "versions": versions()})
    (folder / "what_if.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _columns(
    actor: Actor,
    steps: Sequence[TrainBatch],
    kinds: Sequence[Routes],
    what: str,
    runtime: Runtime,
    *,
    has_score_norms: bool = False,
) -> list[dict[Routes, Tensor]]:
    """Return the columns of each micro-batch, for each way of routing; see `Actor.token_log_probs`."""
    found: list[dict[Routes, Tensor]] = []
    for step in tqdm(steps, desc=what, unit="mini-batch", disable=not runtime.is_main):
        of_kinds = [
            actor.token_log_probs(
                step, Metrics(), is_replaying=routes == "replayed", has_score_norms=has_score_norms
            )
            for routes in kinds
        ]
        found += [dict(zip(kinds, columns, strict=True)) for columns in zip(*of_kinds, strict=True)]
    return found


def _learning(
    steps: Sequence[TrainBatch],
    numbers: Sequence[int],
    columns: Sequence[Mapping[Routes, Tensor]],
    old: Sequence[Mapping[Routes, Tensor]] | None,
    kinds: Sequence[Routes],
) -> list[TokensByRoutes]:
    """Return the learning tokens of this rank's micro-batches; empty unless it reports for its group."""
    if not speaks_for_its_group():
        return []
    microbatches = [m for step in steps for m in step.microbatches]
    every = zip(microbatches, numbers, columns, old or [{}] * len(microbatches), strict=True)
    return [_of_microbatch(m, number, now, before, kinds) for m, number, now, before in every]


def _of_microbatch(
    m: Microbatch,
    rollout: int,
    now: Mapping[Routes, Tensor],
    before: Mapping[Routes, Tensor],
    kinds: Sequence[Routes],
) -> TokensByRoutes:
    rows = m.loss_mask.bool()
    learning, has_topk = with_places(m).rows(rows), m.topk is not None and m.topk.ids.shape[1] > 0
    found: dict[Routes, PolicyTokens] = {}
    for routes in kinds:
        columns = now[routes][rows]
        at_topk = columns[:, 1:-1] if has_topk else None
        inputs = PolicyLossInputs.of(
            learning,
            columns[:, 0].clamp(max=0),
            topk_log_probs=at_topk,
            response_lengths=learning_lengths(m),
        )
        old = before[routes][rows, 0] if routes in before else learning.old_log_probs
        found[routes] = PolicyTokens(
            replace(inputs, loss_mask=None, old_log_probs=old),
            score_norms=columns[:, -1],
            rollouts=torch.full_like(learning.targets, rollout, dtype=torch.long),
        )
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
    """Evaluate the question, write the results, and print the table. Every rank of the job calls this."""
    with join_processes(config) as runtime, full_disk_explained(folder):
        found = answer(config, question, runtime)
        runtime.on_main(lambda: write(folder, found))
        if runtime.is_main:
            typer.echo(as_text(found))
            typer.echo(f"wrote what_if.json and what_if.html to {folder}")
