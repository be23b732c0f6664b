"""Checks whether the SGLang servers of a run can serve a measurement."""

import asyncio
import os
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.rollout.sglang.client import SglangClient
from megatron_dppo.rollout.sglang.protocol import ServerFacts
from megatron_dppo.rollout.sglang.server import API_KEY, registered


def require_usable_servers(config: Config) -> None:
    """Require servers that hold the weights of model.load and capture the routes asked for.

    Raises:
        ConfigError: A server serves another folder, was given other weights since, or captures no routes.
        ServerError: One does not answer.
    """
    problems: list[Problem] = []
    for record in registered(config.run.folder / "servers"):
        facts = asyncio.run(_facts(record.url))
        where = f"server {record.name} at {record.url}"
        if Path(facts.model_path).resolve() != config.model.load.resolve():
            action = "Start a server with this config, or name the folder that it serves."
            problems.append(Problem(where, facts.model_path, f"model.load, {config.model.load}", action))
        if facts.weight_version != 0:
            found, action = f"weights of version {facts.weight_version}", "Restart it; a run has pushed others."
            problems.append(Problem(where, found, "those of model.load, version 0", action))
        if config.rollout.routing_replay != "off" and not facts.captures_routes:
            action = "Restart it with rollout.routing_replay = 'measure'."
            problems.append(Problem(where, "no capture of routes", "one", action))
    if problems:
        raise ConfigError(problems)


async def _facts(url: str) -> ServerFacts:
    async with SglangClient(url, api_key=os.environ.get(API_KEY)) as client:
        return (await client.connect())[1]
