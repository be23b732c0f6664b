"""Continuous batching: runs many requests through the slots of one decoder."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from megatron_dppo.engines.base import (
    Request,
    SamplingParams,
    first_route_row,
    input_tokens,
    join_parts,
    num_tokens_left,
    response_alone,
)
from megatron_dppo.engines.embedded.sampling import draw, most_probable, sampling_log_probs, sampling_noise
from megatron_dppo.engines.embedded.slot_decoder import SlotDecoder
from megatron_dppo.routing_replay.routes import index_dtype
from megatron_dppo.types import RolloutTopK, RoutedExperts, Sample, WeightVersionSpan


@dataclass
class _Rows:
    """State of the occupied slots, one element (row) per slot."""

    request: Tensor  # [n] index into the requests; -1 once its response is finished
    token: Tensor  # [n] next token to forward
    length: Tensor  # [n] number of tokens in the cache
    num_sampled: Tensor  # [n] response tokens, including earlier ones of a resumed response
    limit: Tensor  # [n] largest num_sampled
    noise: Tensor  # [n, max_response_tokens] float64

    def take(self, rows: Tensor) -> "_Rows":
        return _Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def extend(self, other: "_Rows") -> "_Rows":
        return _Rows(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))


class ContinuousBatch:
    """One call of `generate`: slots 0..n-1 decode together; finished slots are freed and refilled in groups.

    Requests that are admitted together and have the same prompt share one prefill. The first decode step
    forwards a prompt's last token, so only the decode step samples. Results are logged in order of time, as
    rows tagged with their request, and are sorted by request at the end.
    """

    PREFILL_TOKENS = 16384  # limits the memory of one prefill
    SWEEP_FRACTION = 1 / 8  # finished fraction of the occupied slots; large enough to amortise a prefill

    def __init__(
        self,
        decoder: SlotDecoder,
        requests: Sequence[Request],
        params: SamplingParams,
        slots: int,
        eos_token_ids: Tensor,
    ) -> None:
        self._decoder, self._requests, self._params = decoder, requests, params
        self._slots, self._eos = slots, eos_token_ids
        self._inputs = [tuple(input_tokens(request)) for request in requests]
        self._num_cached = [0] * len(requests)  # tokens of each input that another request's prefill computed
        self._queue = deque(range(len(requests)))
        longest = max(len(request.prompt_tokens) for request in requests)
        self._cache = decoder.new_cache(slots, longest + params.max_response_tokens - 1)
        self._rows = self._new_rows([])
        self._sampled: list[tuple[Tensor, ...]] = []  # request, token, log_prob, then top-K ids and log-probs
        self._routed: list[tuple[Tensor, Tensor]] = []  # request, experts [n, moe_layers, top_k]

    def run(self) -> None:
        """Sample until every request is finished."""
        num_finished = 0
        while True:
            occupied = self._rows.request.numel()
            if num_finished >= occupied * self.SWEEP_FRACTION:
                self._sweep()
                self._admit()
                occupied = self._rows.request.numel()
            if not occupied:
                return
            num_finished = self._decode()

    def _new_rows(self, requests: list[int]) -> _Rows:
        inputs, asked = (
            [self._inputs[index] for index in requests],
            [self._requests[index] for index in requests],
        )
        length = self._params.max_response_tokens
        noise = [sampling_noise(request.noise_key, length) for request in asked]
        num_sampled = [len(own) - len(r.prompt_tokens) for own, r in zip(inputs, asked, strict=True)]
        limits = [n + num_tokens_left(r, self._params) for n, r in zip(num_sampled, asked, strict=True)]
        device = self._eos.device
        return _Rows(
            request=torch.tensor(requests, dtype=torch.int64, device=device),
            token=torch.tensor([own[-1] for own in inputs], dtype=torch.int64, device=device),
            length=torch.tensor([len(own) - 1 for own in inputs], dtype=torch.int64, device=device),
            num_sampled=torch.tensor(num_sampled, dtype=torch.int64, device=device),
            limit=torch.tensor(limits, dtype=torch.int64, device=device),
            noise=(torch.stack(noise) if noise else torch.zeros(0, length, dtype=torch.float64)).to(device),
        )

    def _sweep(self) -> None:
        """Free the slots of finished rows, and move the others to the front."""
        active = (self._rows.request >= 0).nonzero().squeeze(1)
        if active.numel() < self._rows.request.numel():
            self._rows = self._rows.take(active)
            if active.numel():
                self._cache.keep(active, int(self._rows.length.max()))

    def _admit(self) -> None:
        """Fill free slots from the queue, and forward their prompts except for the last token."""
        occupied = self._rows.request.numel()
        while self._queue and occupied < self._slots:
            room = self._slots - occupied
            newcomers: list[int] = []
            places: dict[tuple[int, ...], int] = {}  # row of each prefix in the prefill
            width = 0
            while self._queue and len(newcomers) < room:
                prefix = self._inputs[self._queue[0]][:-1]
                wider = max(width, len(prefix))
                if prefix in places:
                    self._num_cached[self._queue[0]] = len(prefix)
                elif newcomers and wider * (len(places) + 1) > self.PREFILL_TOKENS:
                    break
                places.setdefault(prefix, len(places))
                newcomers.append(self._queue.popleft())
                width = wider
            self._prefill(newcomers, places, width, occupied)
            self._rows = self._rows.extend(self._new_rows(newcomers))
            occupied += len(newcomers)

    def _prefill(
        self, newcomers: list[int], places: Mapping[tuple[int, ...], int], width: int, first_slot: int
    ) -> None:
        self._cache.clear(first_slot)
        if not width:
            return
        prefixes = [self._inputs[index][:-1] for index in newcomers]
        device = self._eos.device
        tokens = torch.tensor([prefix + (0,) * (width - len(prefix)) for prefix in places], device=device)
        source = torch.tensor([places[prefix] for prefix in prefixes], device=device)
        widths = torch.tensor([len(prefix) for prefix in places], device=device)
        experts = self._decoder.prefill(
            self._cache, tokens, widths, first_slot, source, self._params.capture_routes
        )
        if experts is not None:
            lengths = torch.tensor([len(prefix) for prefix in prefixes], device=device)
            real = torch.arange(width, device=device) < lengths.unsqueeze(1)
            request = torch.tensor(newcomers, device=device).unsqueeze(1).expand(-1, width)
            self._routed.append((request[real], experts[source][real]))

    def _decode(self) -> int:
        """Forward one token of every row and sample the next; return how many rows are finished."""
        rows, params = self._rows, self._params
        live_length = int(rows.length.max()) + 1
        logits, experts = self._decoder.decode(
            self._cache, rows.token, rows.length, live_length, params.capture_routes
        )
        log_probs = sampling_log_probs(logits, params.temperature, params.top_p)
        if params.temperature == 0:
            tokens = log_probs.argmax(-1)
        else:
            position = rows.num_sampled.clamp(max=params.max_response_tokens - 1)
            tokens = draw(log_probs, rows.noise.gather(1, position.unsqueeze(1)).squeeze(1))
        entry = (rows.request, tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1))
        if params.num_topk_log_probs:
            topk = most_probable(log_probs, params.num_topk_log_probs)
            entry += (topk.ids, topk.log_probs)
        self._sampled.append(entry)
        if experts is not None:
            self._routed.append((rows.request, experts))
        rows.num_sampled = rows.num_sampled + 1
        finished = torch.isin(tokens, self._eos) | (rows.num_sampled >= rows.limit)
        finished |= rows.request < 0
        rows.length = rows.length + ~finished  # a finished row overwrites one position until it is swept
        rows.token = tokens
        rows.request = rows.request.masked_fill(finished, -1)
        return int(finished.sum())

    @property
    def num_cached_tokens(self) -> int:
        """Number of input tokens that another request's prefill computed."""
        return sum(self._num_cached)

    def completions(self, version: int) -> list[Sample]:
        """Return one completion per request, in order."""
        sampled = _by_request(self._sampled, len(self._requests))
        routed = _by_request(self._routed, len(self._requests)) if self._routed else []
        dtype = index_dtype(self._decoder.num_experts)
        eos = set(cast(list[int], self._eos.tolist()))  # pyright: ignore[reportUnknownMemberType]
        completions: list[Sample] = []
        for index, request in enumerate(self._requests):
            tokens, log_probs, *topk = sampled[index]
            experts = None
            if self._params.capture_routes:
                indices = routed[index][0].to(dtype)
                forwarded = len(self._inputs[index]) + tokens.numel() - 1
                assert indices.shape[0] == forwarded, "one row of routes for each token forwarded"
                indices = indices[first_route_row(request) :]
                experts = RoutedExperts(indices, self._decoder.moe_layers, self._decoder.num_experts)
            completion = response_alone(
                request.id,
                tokens,
                log_probs,
                "stop" if int(tokens[-1]) in eos else "length",
                topk=RolloutTopK(ids=topk[0], log_probs=topk[1]) if topk else None,
                routed_experts=experts,
                weight_versions=(WeightVersionSpan(0, tokens.numel(), version),),
                num_cached_tokens=self._num_cached[index],
            )
            completions.append(join_parts(request.partial, completion) if request.partial else completion)
        return completions


def _by_request(log: Sequence[tuple[Tensor, ...]], num_requests: int) -> list[tuple[Tensor, ...]]:
    """Split a log into the rows of each request. The first column is the request; rows with -1 are dropped."""
    request, *columns = (torch.cat(parts).cpu() for parts in zip(*log, strict=True))
    order = torch.argsort(request, stable=True)
    order = order[int((request < 0).sum()) :]
    bins = torch.bincount(request[order], minlength=num_requests)
    counts = cast(list[int], bins.tolist())  # pyright: ignore[reportUnknownMemberType]
    # cloned: a view would keep, and save, the complete log
    split = ([part.clone() for part in torch.split(column[order], counts)] for column in columns)
    return list(zip(*split, strict=True))
