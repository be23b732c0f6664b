"""Measures, writes and shows the mismatch of engine and trainer."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from megatron_dppo.actor.actor import Actor
from megatron_dppo.analysis.mismatch.results import Measurement, show, write
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.load import dump_config
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages
from megatron_dppo.engines.base import RolloutEngine
from megatron_dppo.engines.sglang.client import SglangClient
from megatron_dppo.engines.sglang.model import served_model
from megatron_dppo.engines.sglang.protocol import ServerFacts
from megatron_dppo.engines.sglang.quantization import served_folder
from megatron_dppo.engines.sglang.records import api_key, read_records
from megatron_dppo.engines.sglang.server import own_servers
from megatron_dppo.engines.weight_sync.factory import build_sync, served_dtype
from megatron_dppo.engines.weight_sync.probe import require_temperature
from megatron_dppo.errors import ConfigError, Problem, RolloutError, ServerError
from megatron_dppo.mcore.groups import speaks_for_its_group
from megatron_dppo.metrics.engine_comparison import (
    MeasuredResponse,
    Routes,
    are_of_other_weights,
    pairs,
    split_responses,
    token_statistics,
)
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.rollout.counts import RolloutCounts, refuse_if_too_many_dropped
from megatron_dppo.rollout.rollouts import Rollouts, build_engine
from megatron_dppo.run.session import join_processes
from megatron_dppo.run_folder.lock import locked
from megatron_dppo.runtime.files import full_disk_explained
from megatron_dppo.runtime.process import Runtime, Stopwatch
from megatron_dppo.types import TrainBatch

logger = logging.getLogger(__name__)


def run(config: Config, folder: Path) -> None:
    """Measure, write, and show the mismatch; every rank of the job calls this.

    Raises:
        MegatronDppoError: What a run raises too; with several ranks the job ends instead.
        RolloutError: The engine does not serve the weights of model.load; everything is written then.
    """
    with join_processes(config) as runtime, full_disk_explained(folder):
        runtime.on_main(lambda: _begin(config, folder))
        with own_servers(config, runtime), _held(config, runtime):
            is_pushing = True
            if config.rollout.engine == "sglang":
                is_pushing = runtime.on_main(lambda: _require_usable_servers(config))
            found = measure(config, runtime, is_pushing=is_pushing)
        fault = other_weights(config, found.responses, found.statistics)
        runtime.on_main(lambda: write(folder, config, found, runtime, fault))
        if runtime.is_main:
            show(found, folder)
    if fault is not None:
        raise RolloutError(fault) if runtime.is_main else typer.Exit(2)


@contextlib.contextmanager
def _held(config: Config, runtime: Runtime) -> Iterator[None]:
    """Lock the folder of a run with servers that may get weights here, so that no run pushes other weights."""
    with contextlib.ExitStack() as stack:
        if config.rollout.engine == "sglang":
            runtime.on_main(lambda: stack.enter_context(locked(config.run.folder)))
        yield


def other_weights(
    config: Config,
    responses: Sequence[MeasuredResponse],
    statistics: Mapping[Routes, Mapping[str, float]],
) -> str | None:
    """Return a message if the engine does not serve the weights of model.load, else `None`.

    It serves other weights if it disagrees with every kind of routes as much as two models do.
    """
    is_float32 = config.model.dtype == _engine_dtype(config) == "float32"
    for routes in statistics:
        if not are_of_other_weights(*pairs(responses, routes), is_float32=is_float32):
            return None
    live, dtype = statistics["live"], "float32" if is_float32 else "bfloat16"
    mean, kl = (f"{live[name]:.3g}" for name in ("log_prob_diff_mean", "kl_k3"))
    return (
        f"the {config.rollout.engine} engine does not serve the weights of {config.model.load}: found a mean "
        f"|log pi - log mu| of {mean} and a KL (k3) of {kl}, as of two models; expected what rounding in "
        f"{dtype} leaves. See the server's log for tensors that it did not load, and [sglang] for arguments "
        "that change the model or the sampling."
    )


def _engine_dtype(config: Config) -> str:
    """Return the type of the engine's weights."""
    return served_dtype(config) if config.rollout.engine == "sglang" else config.embedded_weights


def rounded_fraction(parameters: Iterable[Tensor], engine_dtype: str, runtime: Runtime) -> float:
    """Return the fraction of all ranks' weights that the engine's type rounds.

    An engine with quantised weights counts as one with the type that it computes in.
    """
    dtype = torch.float32 if engine_dtype == "float32" else torch.bfloat16
    dtype = torch.float16 if engine_dtype in ("float16", "half") else dtype
    counts = torch.zeros(2, dtype=torch.int64)
    for each in parameters:
        changed = each.detach().to(dtype).to(each.dtype) != each.detach()
        counts += torch.tensor([int(changed.sum()), each.numel()])
    num_changed, num_weights = torch.stack(runtime.all_gather(counts)).sum(0).tolist()
    return num_changed / max(num_weights, 1)


def _begin(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mismatch.toml").write_text(dump_config(config))


def _require_usable_servers(config: Config) -> bool:
    """Require servers with the weights of model.load, or without weights, that capture the requested routes.

    Returns:
        Whether the weights must be pushed: a server has none, or has the weights of an earlier measurement.
    """
    problems: list[Problem] = []
    records, is_pushing = read_records(config.run.folder / "servers"), False
    measured = (config.run.folder / "weights" / "version_0").resolve()  # what a push by disk calls its folder
    for record in records:
        facts = asyncio.run(_facts(record.url))
        where, served = f"server {record.name} at {record.url}", Path(facts.model_path).resolve()
        is_pushing |= facts.weight_version == -1 or served == measured
        if served not in (served_folder(config).resolve(), measured):
            action = "Start a server with this config, or name the folder that it serves."
            problems.append(Problem(where, facts.model_path, f"model.load, {config.model.load}", action))
        if facts.weight_version not in (0, -1):
            found, action = f"weights of version {facts.weight_version}", "Restart it; a run has pushed others."
            problems.append(Problem(where, found, "the weights of model.load (version 0), or none", action))
        if config.rollout.routing_replay != "off" and not facts.captures_routes:
            action = "Restart it with rollout.routing_replay = 'measure'."
            problems.append(Problem(where, "no capture of routes", "one", action))
    if problems:
        raise ConfigError(problems)
    model = served_model(config.model.load, ())
    urls, timeout_s = [record.url for record in records], config.rollout.sglang.sync_timeout_s
    failed = require_temperature(urls, model, api_key(), timeout_s)
    if failed:
        raise ServerError(next(iter(failed.values())))
    return is_pushing


async def _facts(url: str) -> ServerFacts:
    async with SglangClient(url, api_key=api_key()) as client:
        return (await client.connect())[1]


def measure(config: Config, runtime: Runtime, *, is_pushing: bool = False) -> Measurement:
    """Roll out once with the weights of model.load, and forward the samples; no weight changes.

    Every rank calls this together. The embedded engine gets the trainer's weights. SGLang's servers have
    the weights of model.load, or get the trainer's weights too.

    Args:
        config: The run's; rollout.prompts_per_rollout prompts are sampled.
        runtime: This process.
        is_pushing: Give SGLang's servers the trainer's weights first.
    """
    timer, folder = Stopwatch(runtime), hf_files(config.model.load)
    with timer.time("load"):
        engine = build_engine(config, folder, runtime.device)
        actor = Actor(config, runtime)
        parameters = (each for chunk in actor.chunks for each in chunk.parameters())
        rounded = rounded_fraction(parameters, _engine_dtype(config), runtime)
        if is_pushing or config.rollout.engine == "transformers":
            _push(config, actor, engine, runtime)
        share = (runtime.rank, runtime.world_size)
        rollouts = Rollouts(config, folder, engine, share=share)
    num_samples = config.rollout.prompts_per_rollout * config.rollout.samples_per_prompt
    logger.info("sampling %d responses with the %s engine", num_samples, config.rollout.engine)
    with closing(rollouts), timer.time("rollout"):
        sampled = rollouts.next(0, engine.weight_version, runtime.all_gather)
        assert sampled is not None, "nothing asks it to stop"
        groups, own_counts, _ = sampled
    counts = _require_responses(own_counts, config, runtime)
    logger.info("%d tokens in %.1f s", counts.num_response_tokens, timer.seconds["rollout"])
    has_routes = config.rollout.routing_replay != "off"
    groups = with_advantages(groups, normalize_std=False)
    routing = actor.routing if has_routes else None
    steps, *_ = gradient_steps(
        groups, 0, config, actor.data_parallel, routing=routing, shares_prefixes=actor.shares_prefixes
    )
    del groups
    kinds: list[Routes] = ["live", "replayed"] if has_routes else ["live"]
    with timer.time("forward"):
        responses, agreement = _forward_all(actor, steps, kinds, runtime)
    statistics: dict[Routes, Mapping[str, float]] = {
        routes: token_statistics(responses, routes) | agreement[routes] for routes in kinds
    }
    return Measurement(tuple(responses), statistics, counts, dict(timer.seconds), rounded)


def _push(config: Config, actor: Actor, engine: RolloutEngine, runtime: Runtime) -> None:
    """Give the engine the trainer's weights; servers read them from disk, in their form."""
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


def _forward_all(
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
                own += split_responses(microbatch, of_microbatch)
    responses = [response for several in runtime.all_gather(own) for response in several]
    responses.sort(key=lambda response: (response.prompt.tolist(), response.tokens.tolist()))
    agreement: dict[Routes, dict[str, float]] = {}
    for routes in kinds:
        merged = Metrics().merge(runtime.all_gather(metrics[routes].state())).values()
        agreement[routes] = {name.removeprefix("routing/"): value for name, value in merged.items()}
    return responses, agreement
