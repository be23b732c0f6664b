"""Rollout engine that samples from SGLang servers: one request per response, every answer checked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from megatron_dppo.engines.base import Completion, Request, SamplingParams
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.engines.sglang.client import Patience, SglangClient
from megatron_dppo.engines.sglang.links import connect
from megatron_dppo.engines.sglang.protocol import ServedModel, ServerFacts
from megatron_dppo.engines.sglang.session import ServerSession
from megatron_dppo.errors import ReplyError, RolloutError, ServerError, WeightSyncError

_NO_VERSION = -2  # -1 is that of weights which were never loaded


@dataclass(frozen=True)
class _Admitted:
    """The servers that get requests, and the version of the weights that they must hold."""

    urls: tuple[str, ...]
    version: int


class SglangEngine:
    """Samples from servers that hold the same weights; implements `engines.base.ConcurrentEngine`.

    Each request carries a seed of its `noise_key`. Servers with `enable_deterministic_inference` draw by it.
    Others draw by their own noise, and a run is not repeated bit for bit.
    Log-probs are of the distribution after temperature; with a `top_p` below 1, of the one before the cut.

    Requests go to the servers that are admitted: all of them, until `admit` says otherwise. One that does not
    answer, or holds other weights, is drained for one session, and tried again in the next. `generate` is a
    session of its own.

    Sessions of several threads may be open at once; each gives a server up to `max_concurrent_requests`.
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
            urls: "http://host:port" of one or more servers that answer.
            model: What they serve.
            patience: Time-outs and retries.
            max_concurrent_requests: Requests that each server is given at a time, by one session.
            api_key: What the servers were started with.

        Raises:
            ServerError: No server answers, is of a known version, and has no options that we refuse.
        """
        self._urls = (urls,) if isinstance(urls, str) else tuple(dict.fromkeys(urls))
        self._model, self._patience = model, patience or Patience()
        self._max_concurrent, self._api_key = max_concurrent_requests, api_key
        self._admitted = _Admitted(self._urls, _common_version(asyncio.run(self._all_facts())))
        self._counts, self._counts_lock = EngineCounts(), threading.Lock()

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`; of the sessions that were left."""
        return self._counts

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of all servers of this engine, admitted or not."""
        return self._urls

    @property
    def weight_version(self) -> int:
        """Version of the weights that servers must hold to be given requests; -2 until servers agree on one."""
        return self._admitted.version

    def admit(self, urls: Sequence[str], version: int) -> None:
        """Send the requests of new sessions to these servers, at least one, and to no others.

        Args:
            urls: They hold weights of this version; one that registered since is known from now on.
            version: What they must report.
        """
        assert urls, "a push that reached no server raises"
        self._urls = tuple(dict.fromkeys([*self._urls, *urls]))
        self._admitted = _Admitted(tuple(dict.fromkeys(urls)), version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Refuse: servers get their weights through a weight sync, not through this call.

        Raises:
            WeightSyncError: Always.
        """
        raise WeightSyncError(
            f"weight version {version}: found tensors for an engine whose servers hold the weights; "
            "expected a push by weight_sync, and then admit. This is a fault of the caller: report it."
        )

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one response per request, in their order; see `RolloutEngine`.

        A request without a usable answer comes back aborted and empty, and is counted in `counts`.

        Raises:
            RolloutError: A prompt does not fit, or the servers cannot give what `params` asks for.
            ServerError: No server is left that answers and holds the weights, or no request was answered.
        """
        return asyncio.run(self._generate(requests, params))

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[ServerSession]:
        """Connect to the admitted servers; see `ConcurrentEngine.session`.

        Its `hold` waits at most `Patience.control_timeout_s` for a server's next answer to what was aborted.

        Raises:
            ServerError: No server is left that answers and holds the weights.
        """
        return self._session(may_be_held=may_be_held)

    def _client(self, url: str) -> SglangClient:
        return SglangClient(url, self._patience, api_key=self._api_key)

    async def _all_facts(self) -> list[ServerFacts]:
        """Return the facts of the servers that answer; the others are drained in the next session."""

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

    async def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        async with self._session(may_be_held=False) as session:
            session.refuse(requests, params)
            completions = await asyncio.gather(*(session.ask(request, params) for request in requests))
        lost = [error for error in session.errors.values() if isinstance(error, ServerError)]
        if lost and len(lost) == len(requests):
            raise lost[0]
        return completions

    @asynccontextmanager
    async def _session(self, *, may_be_held: bool) -> AsyncIterator[ServerSession]:
        """Open a session, and add its counts to the engine's when it is left."""
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


def _common_version(facts: Sequence[ServerFacts]) -> int:
    """Return the weight version that all servers hold; servers that differ wait for a push."""
    versions = {each.weight_version for each in facts}
    return versions.pop() if len(versions) == 1 else _NO_VERSION
