"""Verifies the weights of servers by the log-probs of sequences that use every tensor.

An unpatched server does not expose its weights. But each weight that a token passes changes the log-probs of
the following tokens. So the probe compares the trainer's and the server's log-probs on the same random
sequences, and adds sequences until each expert of each layer has been chosen. The limits of float32 are so
small that one token exceeds them if two experts' scores tie and trainer and server choose different ones. So
a server of a float32 run is refused only if it also differs on twice as many others with the same experts.
"""

# PyTorch does not annotate tolist.
# pyright: reportUnknownMemberType=false
import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import SglangClient, ask_each, new_rid
from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.engines.weight_sync.fleet import Member
from megatron_dppo.errors import MegatronDppoError, ReplyError, WeightSyncError
from megatron_dppo.metrics.engine_comparison import are_of_other_weights
from megatron_dppo.runtime.concurrency import all_of
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import RoutedExperts

logger = logging.getLogger(__name__)
_LENGTH = 64  # tokens of a sequence
_FIRST, _MOST = 8, 256  # number of sequences: doubled until all experts were chosen
_FIRST_OF_TURNS = 32
_TEMPERATURE, _MOST_TOKENS, _FLAT = 2.0, 20, 1e-6


@dataclass(frozen=True)
class Limits:
    """Largest accepted |log pi - log mu|, for single tokens and in the mean."""

    mean: float
    largest: float
    is_float32: bool = False

    @classmethod
    def of(cls, dtype: str) -> "Limits":
        """Return the limits of a dtype; in bfloat16 single tokens are not bounded."""
        return cls(1e-5, 1e-4, True) if dtype == "float32" else cls(0.2, float("inf"))


@dataclass(frozen=True)
class Scores:
    """Log-probs of the sequences from one server."""

    log_probs: Tensor  # [S, L-1]: of each token after the first
    is_chosen: Tensor | None  # [moe_layers, experts]: experts that the sequences reached; `None` without routes


class Probe:
    """Compares each server with the trainer; the sequences are the same for the life of a run."""

    def __init__(
        self,
        log_probs: Callable[[Sequence[Tensor]], list[Tensor]],
        model: ServedModel,
        runtime: Runtime,
        *,
        limits: Limits,
        seed: int,
        api_key: str | None,
        timeout_s: float,
    ) -> None:
        """Draw the sequences.

        Args:
            log_probs: Trainer's log-probs of each token after the first, at temperature 1; all ranks call it.
            model: Served model.
            runtime: Runtime of this rank.
            limits: Largest differences between a server and the trainer with equal weights.
            seed: Seed of the sequences.
            api_key: API key that servers were started with.
            timeout_s: Time in which servers must have scored the sequences.
        """
        self._log_probs, self._model, self._runtime = log_probs, model, runtime
        self._limits, self._api_key, self._timeout_s = limits, api_key, timeout_s
        generator = torch.Generator().manual_seed(seed)
        ids = model.vocab_size - 1  # SGLang gives the last token of a vocabulary the log-prob of the first
        self._sequences = torch.randint(ids, (3 * _MOST, _LENGTH), generator=generator)
        self._takes_turns = runtime.gpu_ledger.takes_turns
        self._num_sequences = _FIRST_OF_TURNS if self._takes_turns else _FIRST
        self._expected: dict[int, Tensor] = {}  # the trainer's, by the index of the first of these sequences
        self.failures: dict[str, str] = {}
        """Why members of the last comparison failed, by URL."""

    def expect(self) -> None:
        """Compute the trainer's log-probs for the next `run`; all ranks call it, before a push.

        If the trainer leaves its GPU for the engine, `run` compares only these sequences. If they did not reach
        every expert, the next comparison has twice as many.
        """
        num = self._num_sequences
        self._expected = {0: self._of_trainer(0, num, _LENGTH)}
        if self._takes_turns and self._limits.is_float32:
            self._expected[_MOST] = self._of_trainer(_MOST, 2 * num, _LENGTH)

    def run(self, members: Sequence[Member]) -> dict[str, float]:
        """Compare all members with the trainer, and return metrics; all ranks call it together.

        Members that fail are left out of the comparison, and `failures` has the reasons, by URL.

        Raises:
            WeightSyncError: A server's log-probs differ by more than the limits. In float32: those of further
                sequences too, or these do not reach the same experts.
        """
        scores, self.failures = self._runtime.on_main(lambda: self._scores_of(members))
        metrics, fault = self._compare(scores, 0)
        if fault and self._limits.is_float32:
            num = len(next(iter(scores.values())).log_probs)
            further, lost = self._runtime.on_main(lambda: self._ask(list(scores), 2 * num, _MOST))
            self.failures |= lost
            found, remains = self._compare(further, _MOST)
            if further and not remains and all(_reach_as_many(further[m], scores[m]) for m in further):
                logger.warning(
                    "weights: log-probs of trainer and server differ by %.1g on %d sequences, and not on %d "
                    "others: two experts' scores tie",
                    metrics["sync/probe_abs_diff_max"],
                    num,
                    2 * num,
                )
                metrics, fault = found, None
        self._expected = {}  # valid for this push only
        if fault:
            raise WeightSyncError(fault)
        return metrics

    def _of_trainer(self, start: int, num: int, length: int) -> Tensor:
        """Return the trainer's log-probs of `num` sequences, [num, length - 1]; all ranks call it."""
        of_sequences = self._log_probs(list(self._sequences[start : start + num, :length]))
        return torch.stack(of_sequences)

    def _compare(self, scores: Mapping[Member, Scores], start: int) -> tuple[dict[str, float], str | None]:
        """Return metrics of the sequences from `start`, and what is wrong with the first wrong server."""
        if not scores:
            return {}, None
        num = len(next(iter(scores.values())).log_probs)
        length = max(of_server.log_probs.shape[1] for of_server in scores.values())
        expected = self._expected.get(start, torch.empty(0, _LENGTH - 1))[:, :length]
        if num > len(expected):
            rest = self._of_trainer(start + len(expected), num - len(expected), length + 1)
            expected = torch.cat([expected, rest])
        of_trainer = {
            member: expected[:num, : of_server.log_probs.shape[1]] for member, of_server in scores.items()
        }  # a server may take shorter prompts than others
        differences = [(each.log_probs - of_trainer[member]).abs() for member, each in scores.items()]
        faults = [self._fault(member, each.log_probs, of_trainer[member]) for member, each in scores.items()]
        found = {
            "sync/probe_abs_diff_mean": max(float(difference.mean()) for difference in differences),
            "sync/probe_abs_diff_max": max(float(difference.max()) for difference in differences),
        }
        reached = [_num_not_reached(each) for each in scores.values() if each.is_chosen is not None]
        if reached:  # otherwise no server reports routes
            found["sync/probe_experts_not_reached"] = float(max(reached))
        return found, next(filter(None, faults), None)

    def _fault(self, member: Member, found: Tensor, expected: Tensor) -> str | None:
        difference, limits = (found - expected).abs(), self._limits
        mean, largest = float(difference.mean()), float(difference.max())
        are_others = are_of_other_weights(expected, found, is_float32=limits.is_float32)
        if mean <= limits.mean and largest <= limits.largest and not are_others:
            return None
        where = (
            f"{member.url}: found log-probs that differ from the trainer's by {mean:.2g} in the mean and "
            f"{largest:.2g} at most, right after an update; expected at most {limits.mean:g} and "
            f"{limits.largest:g}. The server does not hold the trainer's weights"
        )
        if are_others:
            return (
                f"{where}: they agree no better than two unrelated models. It may build tensors that no push "
                "fills: see its log, or use rollout.engine = 'transformers' for this model, and report it."
            )
        return (
            f"{where}, or computes differently: compare dtype and model_path of [sglang] with model.dtype, "
            "and see its log."
        )

    def _scores_of(self, members: Sequence[Member]) -> tuple[dict[Member, Scores], dict[str, str]]:
        """Return each member's scores, of as many sequences as the first needs to reach every expert.

        Members that fail have a fault instead, by URL.
        """
        num = self._num_sequences
        scores, faults = self._ask(members, num)
        while (first := next(iter(scores), None)) is not None:
            if not _num_not_reached(scores[first]) or self._num_sequences >= _MOST:
                break
            self._num_sequences *= 2
            if self._takes_turns:
                break  # for the next comparison: these scores are compared with what `expect` computed
            num = self._num_sequences
            more, lost = self._ask([first], num)
            scores, faults = ({**scores, **more} if more else _without(scores, first)), faults | lost
        lacking = [member for member, each in scores.items() if len(each.log_probs) < num]
        if lacking:
            more, lost = self._ask(lacking, num)
            scores = {member: more.get(member, each) for member, each in scores.items()}
            scores = {member: each for member, each in scores.items() if member.url not in lost}
            faults |= lost
        if first is not None and (num_left := _num_not_reached(scores[first])) and num == _MOST:
            logger.warning("weights: %d experts were chosen by none of %d sequences", num_left, num)
        return scores, faults

    def _ask(
        self, members: Sequence[Member], num_sequences: int, start: int = 0
    ) -> tuple[dict[Member, Scores], dict[str, str]]:
        """Return the scores of the members that reply, and the faults of the others, by URL."""
        sequences = self._sequences[start : start + num_sequences]
        work = {member.url: partial(self._score, sequences=sequences) for member in members}
        found = asyncio.run(ask_each(work, timeout_s=self._timeout_s, api_key=self._api_key))
        scores, faults = dict[Member, Scores](), dict[str, str]()
        for member in members:
            each = found[member.url]
            if isinstance(each, MegatronDppoError):
                faults[member.url] = str(each)
                continue
            routes = [routes for _, routes in each if routes is not None]
            scores[member] = Scores(torch.stack([log_probs for log_probs, _ in each]), _find_chosen(routes))
        return scores, faults

    async def _score(
        self, client: SglangClient, sequences: Tensor
    ) -> list[tuple[Tensor, RoutedExperts | None]]:
        """Return log-probs [L-1] and routes of each sequence."""
        generation, facts = await client.connect()
        sequences = sequences[:, : facts.max_prompt_tokens]
        with_routes, places = facts.captures_routes, asyncio.Semaphore(facts.max_running_requests)

        async def score(index: int) -> tuple[Tensor, RoutedExperts | None]:
            tokens = cast(list[int], sequences[index].tolist())
            body = generation.score_body(new_rid(f"probe+{index}"), tokens, with_routes=with_routes)
            async with places:
                answer = await client.generate(body)
            return await generation.read_scores(answer, tokens, self._model, with_routes=with_routes)

        return await all_of(map(score, range(len(sequences))))


def require_temperature(
    urls: Sequence[str], model: ServedModel, api_key: str | None, timeout_s: float
) -> dict[str, str]:
    """Require that servers return log-probs at the temperature of the request; two requests per server.

    A server that was started outside this package may return log-probs at temperature 1 instead, and does not
    report it (SGLANG_RETURN_ORIGINAL_LOGPROB). At temperature 2, log-probs differ half as much as at 1.

    Returns:
        Why servers, by URL, could not be tried.
    """
    work = {url: partial(_slope, model=model) for url in urls}
    found = asyncio.run(ask_each(work, timeout_s=timeout_s, api_key=api_key))
    for url, slope in found.items():
        if isinstance(slope, float) and slope > (1 + 1 / _TEMPERATURE) / 2:
            raise WeightSyncError(
                f"{url}: found log-probs at temperature {_TEMPERATURE:g} that lie {slope:.3g} times as far "
                f"apart as at 1; expected {1 / _TEMPERATURE:g} times. They lack the temperature: start this "
                "server without SGLANG_RETURN_ORIGINAL_LOGPROB."
            )
    return {url: str(each) for url, each in found.items() if isinstance(each, MegatronDppoError)}


def _find_chosen(routes: Sequence[RoutedExperts]) -> Tensor | None:
    """Return which experts were chosen at least once, [moe_layers, experts] bool, or None without routes."""
    if not routes:
        return None
    indices = torch.cat([of_sequence.indices for of_sequence in routes]).long()  # [tokens, layers, top_k]
    is_chosen = torch.zeros(indices.shape[1], routes[0].num_experts, dtype=torch.bool)
    return is_chosen.scatter_(1, indices.transpose(0, 1).flatten(1), True)


def _reach_as_many(scores: Scores, others: Scores) -> bool:
    return _num_not_reached(scores) <= _num_not_reached(others)


def _num_not_reached(scores: Scores) -> int:
    return 0 if scores.is_chosen is None else int((~scores.is_chosen).sum())


async def _slope(client: SglangClient, model: ServedModel) -> float | None:
    """Return the ratio of log-prob differences at `_TEMPERATURE` to those at 1, or None if all are equal."""
    generation, _ = await client.connect()

    async def log_probs(temperature: float) -> dict[int, float]:
        num_topk = min(_MOST_TOKENS, model.vocab_size)
        params = SamplingParams(1, temperature=temperature, num_topk_log_probs=num_topk)
        request = Request(new_rid("temperature"), (min(1, model.vocab_size - 1),), (0, 0, 0))
        content = await client.generate(generation.generate_body(request, params, model))
        topk = (await generation.read_reply(content, request, params, model)).topk
        if topk is None:  # aborted in the server's queue
            raise ReplyError(f"{client.url}: found no Top-K; expected {num_topk} log-probs of one token")
        ids, found = cast(list[int], topk.ids[0].tolist()), cast(list[float], topk.log_probs[0].tolist())
        return dict(zip(ids, found, strict=True))

    plain, scaled = await log_probs(1.0), await log_probs(_TEMPERATURE)
    shared = sorted(plain.keys() & scaled.keys())
    plain_of, scaled_of = (_centre([found[token] for token in shared]) for found in (plain, scaled))
    norm = float(plain_of @ plain_of)
    return float(plain_of @ scaled_of) / norm if norm > _FLAT else None


def _without(scores: Mapping[Member, Scores], member: Member) -> dict[Member, Scores]:
    return {other: each for other, each in scores.items() if other != member}


def _centre(values: Sequence[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor - tensor.mean()
