"""Connects to the servers that have weights of one version."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.engines.sglang.client import SglangClient
from megatron_dppo.engines.sglang.protocol import Generation, ServerFacts
from megatron_dppo.errors import ReplyError, RolloutError, ServerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """A connected server: its client, and the protocol adapter of its version."""

    client: SglangClient
    generation: Generation
    facts: ServerFacts


async def connect(clients: Sequence[SglangClient], version: int) -> dict[str, Link]:
    """Connect to the servers, and return by URL those with weights of this version.

    Raises:
        ServerError: No server responds with weights of this version.
    """

    async def link(client: SglangClient) -> Link | RolloutError:
        try:
            generation, facts = await client.connect()
        except (ServerError, ReplyError) as error:
            return error
        if facts.weight_version != version:
            return other_weights(client.url, facts.weight_version, version)
        return Link(client, generation, facts)

    found = dict(
        zip((client.url for client in clients), await asyncio.gather(*map(link, clients)), strict=True)
    )
    links = {url: link for url, link in found.items() if isinstance(link, Link)}
    faults = {url: fault for url, fault in found.items() if isinstance(fault, RolloutError)}
    if not links:
        raise ServerError("\n".join(map(str, faults.values())))
    for url, fault in faults.items():
        logger.warning("server %s is drained: %s", url, fault)
    return links


def other_weights(url: str, found: int, expected: int) -> ServerError:
    """Return the error for a server with weights of another version."""
    return ServerError(
        f"{url}: found weights of version {found}; expected {expected}. The server was restarted, or another "
        "process sent it weights. Push the weights again before sampling."
    )
