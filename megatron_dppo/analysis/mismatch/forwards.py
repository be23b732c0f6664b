"""Samples once, then forwards the same tokens twice: with live routes, and with the rollout's."""

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_dppo.actor.actor import Actor
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages
from megatron_dppo.engines.base import RolloutEngine
from megatron_dppo.engines.weight_sync.factory import build_sync
from megatron_dppo.errors import RolloutError
from megatron_dppo.mcore.groups import speaks_for_its_group
from megatron_dppo.metrics.engine_comparison import (
    MeasuredResponse,
    Routes,
    measured_responses,
    token_statistics,
)
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.rollout.counts import RolloutCounts, refuse_if_too_many_dropped
from megatron_dppo.rollout.rollouts import Rollouts, build_engine
from megatron_dppo.runtime.process import Runtime, Stopwatch
from megatron_dppo.types import SampleGroup, TrainBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurement:
    """Results of a measurement, the same on every rank."""

    responses: tuple[MeasuredResponse, ...]  # in an order that no layout changes
    statistics: Mapping[Routes, Mapping[str, float]]
    counts: RolloutCounts
    seconds: Mapping[str, float]


def measure(config: Config, runtime: Runtime, *, is_pushing: bool = False) -> Measurement:
    """Roll out once with the weights of model.load, and forward the samples; no weight changes.

    Every rank calls this together. The embedded engine gets the trainer's weights. SGLang's servers have
    the weights of model.load, or get the trainer's weights too.

    Args:
        config: The run's; rollout.prompts_per_rollout prompts are sampled.
        runtime: This process.
        is_pushing: Give SGLang's servers the trainer's weights first.

    Raises:
        RolloutError: More samples were dropped than rollout.max_dropped_fraction, or nothing was sampled.
    """
    timer, folder = Stopwatch(runtime), hf_files(config.model.load)
    with timer.time("load"):
        engine = build_engine(config, folder, runtime.device)
        actor = Actor(config, runtime)
        if is_pushing or config.rollout.engine == "transformers":
            _push(config, actor, engine, runtime)
        share = (runtime.rank, runtime.world_size)
        rollouts = Rollouts(config, folder, engine, share=share)
    num_samples = config.rollout.prompts_per_rollout * config.rollout.samples_per_prompt
    logger.info("sampling %d responses with the %s engine", num_samples, config.rollout.engine)
    with closing(rollouts), timer.time("rollout"):
        groups, own_counts = rollouts.next(0)
    counts = _require_responses(own_counts, config, runtime)
    logger.info("%d tokens in %.1f s", counts.num_response_tokens, timer.seconds["rollout"])
    steps = _steps(with_advantages(groups, normalize_std=False), config, actor)
    del groups
    kinds: list[Routes] = ["live"] if config.rollout.routing_replay == "off" else ["live", "replayed"]
    with timer.time("forward"):
        responses, agreement = _forwarded(actor, steps, kinds, runtime)
    statistics: dict[Routes, Mapping[str, float]] = {
        routes: token_statistics(responses, routes) | agreement[routes] for routes in kinds
    }
    return Measurement(tuple(responses), statistics, counts, dict(timer.seconds))


def _push(config: Config, actor: Actor, engine: RolloutEngine, runtime: Runtime) -> None:
    """Give the engine the trainer's weights; servers read them from disk, quantised if they were started so."""
    sglang = config.rollout.sglang.model_copy(update={"weight_sync": "disk", "probe_every": 0})
    rollout = config.rollout.model_copy(update={"sglang": sglang})
    with closing(build_sync(config.model_copy(update={"rollout": rollout}), actor, engine, runtime)) as sync:
        sync.push(0)


def _require_responses(own: RolloutCounts, config: Config, runtime: Runtime) -> RolloutCounts:
    """Return the counts over all ranks. Raise if no response is left to measure."""
    totals = torch.stack(runtime.all_gather(own.to_tensor())).sum(0)
    counts = own.with_totals(totals)
    refuse_if_too_many_dropped(counts, config.rollout.max_dropped_fraction)
    if counts.num_response_tokens == 0:
        raise RolloutError(
            f"rollout: found no response to {counts.num_prompts} prompts, {counts.num_prompts_too_long} of "
            f"them longer than data.max_prompt_tokens = {config.data.max_prompt_tokens}; expected some. Raise "
            "it, or measure more prompts."
        )
    return counts


def _steps(groups: list[SampleGroup], config: Config, actor: Actor) -> list[TrainBatch]:
    routing = actor.routing if config.rollout.routing_replay != "off" else None
    return gradient_steps(groups, 0, config, actor.data_parallel, routing=routing)[0]


def _forwarded(
    actor: Actor, steps: list[TrainBatch], kinds: list[Routes], runtime: Runtime
) -> tuple[list[MeasuredResponse], dict[Routes, dict[str, float]]]:
    """Gather all ranks' responses, and the routers' agreement, for each way of forwarding them."""
    metrics: dict[Routes, Metrics] = {routes: Metrics() for routes in kinds}
    own: list[MeasuredResponse] = []
    for step in tqdm(steps, desc="forward", unit="mini-batch", disable=not runtime.is_main):
        columns: dict[Routes, list[Tensor]] = {
            routes: actor.token_log_probs(step, metrics[routes], is_replaying=routes == "replayed")
            for routes in kinds
        }
        if speaks_for_its_group():
            for index, microbatch in enumerate(step.microbatches):
                of_microbatch: dict[Routes, Tensor] = {routes: columns[routes][index] for routes in kinds}
                own += measured_responses(microbatch, of_microbatch)
    responses = [response for several in runtime.all_gather(own) for response in several]
    responses.sort(key=lambda response: (response.prompt.tolist(), response.tokens.tolist()))
    agreement: dict[Routes, dict[str, float]] = {}
    for routes in kinds:
        merged = Metrics().merge(runtime.all_gather(metrics[routes].state())).values()
        agreement[routes] = {name.removeprefix("routing/"): value for name, value in merged.items()}
    return responses, agreement
