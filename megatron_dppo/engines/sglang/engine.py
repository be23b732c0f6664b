"""Rollout engine that samples from SGLang servers: one request per response, every response checked."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
)
from megatron_dppo.engines.sglang.client import Patience, SglangClient, connect
from megatron_dppo.engines.sglang.protocol import ServedModel, ServerFacts
from megatron_dppo.engines.sglang.session import ServerSession
from megatron_dppo.errors import ReplyError, RolloutError, ServerError, WeightSyncError
from megatron_dppo.types import Sample

_NO_VERSION = -2  # -1 means that weights were never loaded


@dataclass(frozen=True)
class _Admitted:
    """The servers that get requests, and the weight version that they must have."""

    urls: tuple[str, ...]
    version: int


class SglangEngine:
    """Samples from servers that have the same weights; implements `engines.base.RolloutEngine`.

    Each request carries a seed computed from its `noise_key`. Servers with `enable_deterministic_inference`
    sample with this seed. Other servers use their own noise, and then a run does not repeat bit for bit.
    Log-probs include the temperature; if `top_p` is below 1, they do not include the top_p cut.

    Requests go to the admitted servers, which are all servers until `admit` is called. A server that does not
    respond or has other weights is drained for one session, and tried again in the next session. `generate`
    opens its own session.

    Several threads may have open sessions; each session sends a server up to `max_concurrent_requests`.
    """

    def __init__(
        self,
        urls: Sequence[str] | str,
        model: ServedModel,
        patience: Patience | None = None,
        *,
        max_concurrent_requests: int = 256,
        api_key: str | None = None,
    ) -> None:
        """Connect once, so that an unusable server is found at start-up.

        Args:
            urls: "http://host:port" of one or more running servers.
            model: Model that the servers serve.
            patience: Time-outs and retries.
            max_concurrent_requests: Largest number of requests in flight at one server, from one session.
            api_key: API key that the servers were started with.
        """
        self._urls = (urls,) if isinstance(urls, str) else tuple(dict.fromkeys(urls))
        self._model, self._patience = model, patience or Patience()
        self._max_concurrent, self._api_key = max_concurrent_requests, api_key
        self._admitted = _Admitted(self._urls, _common_version(asyncio.run(self._all_facts())))
        self._counts, self._counts_lock = EngineCounts(), threading.Lock()
        self._refusals = Counter[str]()

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`; includes only sessions that were left."""
        return self._counts

    @property
    def refusals(self) -> Mapping[str, int]:
        """See `RolloutEngine.refusals`; includes only sessions that were left."""
        return dict(self._refusals)

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all servers of this engine, admitted or not."""
        return self._urls

    @property
    def weight_version(self) -> int:
        """Weight version that servers must have to get requests; -2 until all servers have the same one."""
        return self._admitted.version

    def admit(self, urls: Sequence[str], version: int) -> None:
        """Send the requests of new sessions only to these servers.

        Args:
            urls: At least one server with weights of this version; new servers are added to `urls`.
            version: Weight version that the servers must report.
        """
        assert urls, "a push that reached no server raises"
        self._urls = tuple(dict.fromkeys([*self._urls, *urls]))
        self._admitted = _Admitted(tuple(dict.fromkeys(urls)), version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Refuse: servers get their weights through a weight sync, not through this call."""
        raise WeightSyncError(
            f"weight version {version}: found tensors for an engine whose servers hold the weights; "
            "expected a push by weight_sync, and then admit. This is a fault of the caller: report it."
        )

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """Sample one response per request, in their order; see `RolloutEngine`.

        A request without a usable response returns an aborted, empty completion, and is counted in `counts`.
        """
        return asyncio.run(self._generate(requests, params))

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[ServerSession]:
        """Connect to the admitted servers; see `RolloutEngine.session`.

        The session's `hold` waits at most `Patience.control_timeout_s` for a server's next aborted response.
        """
        return self._session(may_be_held=may_be_held)

    def _client(self, url: str) -> SglangClient:
        return SglangClient(url, self._patience, api_key=self._api_key)

    async def _all_facts(self) -> list[ServerFacts]:
        """Return the facts of the servers that respond; the next session drains the others."""

        async def facts_of(url: str) -> ServerFacts | RolloutError:
            try:
                async with self._client(url) as client:
                    return (await client.connect())[1]
            except (ServerError, ReplyError) as error:
                return error

        found = await asyncio.gather(*(facts_of(url) for url in self._urls))
        facts = [each for each in found if isinstance(each, ServerFacts)]
        if not facts:
            raise next(each for each in found if isinstance(each, RolloutError))
        return facts

    async def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        async with self._session(may_be_held=False) as session:
            session.refuse(requests, params)
            completions = await asyncio.gather(*(session.ask(request, params) for request in requests))
        lost = [error for error in session.errors.values() if isinstance(error, ServerError)]
        if lost and len(lost) == len(requests):
            raise lost[0]
        return completions

    @asynccontextmanager
    async def _session(self, *, may_be_held: bool) -> AsyncGenerator[ServerSession]:
        """Open a session, and add its counts to the engine's counts when it is left."""
        admitted = self._admitted  # another thread may replace it
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client(url)) for url in admitted.urls]
            links = await connect(clients, admitted.version)
            session = ServerSession(
                links,
                self._model,
                admitted.version,
                max_in_flight=self._max_concurrent,
                hold_timeout_s=self._patience.control_timeout_s,
                may_be_held=may_be_held,
            )
            try:
                async with session:
                    yield session
            finally:
                absent = (client.counts for client in clients if client.url not in links)
                counts = sum(absent, session.counts)
                with self._counts_lock:
                    self._counts += counts
                    self._refusals += session.refusals


def _common_version(facts: Sequence[ServerFacts]) -> int:
    """Return the weight version of all servers, or -2 if they differ and need a push."""
    versions = {each.weight_version for each in facts}
    return versions.pop() if len(versions) == 1 else _NO_VERSION
