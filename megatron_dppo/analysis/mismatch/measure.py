"""Measures, writes and shows the mismatch of engine and trainer."""

import asyncio
import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from megatron_dppo.analysis.mismatch.forwards import Measurement, measure
from megatron_dppo.analysis.mismatch.settings import FILES
from megatron_dppo.analysis.report.mismatch_plot import write_plot
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.load import dump_config
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.client import SglangClient
from megatron_dppo.engines.sglang.model import served_model
from megatron_dppo.engines.sglang.own_servers import own_servers
from megatron_dppo.engines.sglang.protocol import ServerFacts
from megatron_dppo.engines.sglang.server import API_KEY, registered
from megatron_dppo.engines.weight_sync.factory import served_dtype
from megatron_dppo.engines.weight_sync.temperature import require_temperature
from megatron_dppo.errors import ConfigError, Problem, RolloutError
from megatron_dppo.metrics.token_mismatch import (
    MeasuredResponse,
    Routes,
    are_of_other_weights,
    pairs,
    token_rows,
)
from megatron_dppo.run.session import join_processes
from megatron_dppo.run_folder.folder import json_values
from megatron_dppo.run_folder.lock import locked
from megatron_dppo.run_folder.versions import versions
from megatron_dppo.runtime.full_disk import full_disk_explained
from megatron_dppo.runtime.jsonl import write_jsonl
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.runtime.tables import show_table

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
        runtime.on_main(lambda: _write(folder, config, found, runtime, fault))
        if runtime.is_main:
            _show(found, folder)
    if fault is not None:
        raise RolloutError(fault) if runtime.is_main else typer.Exit(2)


@contextlib.contextmanager
def _held(config: Config, runtime: Runtime) -> Iterator[None]:
    """Lock the folder of a run whose servers may get weights here, against a run that would push others."""
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
    is_sglang = config.rollout.engine == "sglang"
    served = served_dtype(config) if is_sglang else config.rollout.transformers.weights
    is_float32 = config.model.dtype == served == "float32"
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


def _begin(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mismatch.toml").write_text(dump_config(config))


def _write(folder: Path, config: Config, found: Measurement, runtime: Runtime, fault: str | None) -> None:
    """Write the files of the output folder; mismatch.json comes last."""
    write_jsonl(folder / "tokens.jsonl", token_rows(found.responses))
    title = f"{config.model.load.name}: {config.rollout.engine} engine, {config.model.dtype} trainer"
    write_plot(folder / "mismatch.html", found.responses, list(found.statistics), title)
    content: dict[str, Any] = {
        "engine": config.rollout.engine,
        "num_processes": runtime.world_size,
        "num_responses": len(found.responses),
        "serves_these_weights": fault is None,
        "rollout": {name.removeprefix("rollout/"): value for name, value in found.counts.metrics().items()},
        "seconds": found.seconds,
        **json_values(found.statistics),
        "versions": versions(),
        "config": config.model_dump(mode="json"),
    }
    (folder / "mismatch.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _require_usable_servers(config: Config) -> bool:
    """Require servers with the weights of model.load, or without weights, that capture the requested routes.

    Returns:
        Whether the weights must be pushed: a server has none, or has the weights of an earlier measurement.

    Raises:
        ConfigError: A server serves another folder, was given other weights since, or captures no routes.
        ServerError: A server does not respond.
        WeightSyncError: A server returns log-probs without the temperature.
    """
    problems: list[Problem] = []
    records, is_pushing = registered(config.run.folder / "servers"), False
    measured = (config.run.folder / "weights" / "version_0").resolve()  # what a push by disk calls its folder
    for record in records:
        facts = asyncio.run(_facts(record.url))
        where, served = f"server {record.name} at {record.url}", Path(facts.model_path).resolve()
        is_pushing |= facts.weight_version == -1 or served == measured
        if served not in (hf_files(config.model.load).resolve(), measured):
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
    require_temperature([record.url for record in records], model, os.environ.get(API_KEY))
    return is_pushing


async def _facts(url: str) -> ServerFacts:
    async with SglangClient(url, api_key=os.environ.get(API_KEY)) as client:
        return (await client.connect())[1]


def _show(found: Measurement, folder: Path) -> None:
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
        return f"With live routes the KL (k3) is 0: replay cannot lower it. With replay it is {replayed:.3e}."
    verb = "lowers" if replayed <= live else "raises"
    return (
        f"Replaying the rollout's routes {verb} the KL (k3) by {abs(1 - replayed / live):.0%} on these tokens."
    )
