"""Validates samples, and scores them with the run's reward workers.

A faulty sample is dropped with a reason, and never repaired.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from megatron_dppo.algorithms.advantages import LARGEST_REWARD
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.environments import Episode
from megatron_dppo.errors import RewardError, RoutingReplayError
from megatron_dppo.rewards import RewardChoice, RewardFault, RewardPool, RewardRequest, RewardResult
from megatron_dppo.rollout.counts import DropReason
from megatron_dppo.types import Prompt, Sample
from megatron_dppo.workers.service import FileDigests

_TRIED_GROUP = 2  # responses to try a reward of groups on: one alone has nothing to compare with

RouteValidator = Callable[[Sample], None]
"""Raises RoutingReplayError if a sample's captured routes do not fit the model or its tokens."""


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that rollout calls, with plain types."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Return the token ids of a text prompt, a list of int."""
        ...

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **template_arguments: Any,
    ) -> Any:
        """Return the token ids of a chat prompt, a list of int."""
        ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """Return the text of a list of token ids."""
        ...


@dataclass(frozen=True)
class Fault:
    """The reason why a sample was dropped."""

    reason: DropReason
    sample_id: str
    found: str
    sample: Sample | None = dataclasses.field(default=None, compare=False, repr=False)  # of a group's response

    def __str__(self) -> str:
        return f"{self.reason}, sample {self.sample_id}: {self.found}"


class RewardScorer(Protocol):
    """The interface of a `RewardPool` that scoring uses."""

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """Return the result of one request; several calls may run at once."""
        ...

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return the results of all responses to a prompt, for a reward that gets them at once."""
        ...


@dataclass(frozen=True)
class OverlongShaping:
    """Penalises responses that reach the last tokens of the limit (DAPO, arXiv:2503.14476, equation 13).

    Only tokens that the policy sampled count. Observations of environments count towards the limit of a
    conversation, but cost nothing.

    Attributes:
        max_response_tokens: Limit of a response.
        buffer_tokens: Number of tokens before the limit that are penalised; less than `max_response_tokens`.
        penalty: Penalty of a response that reaches the limit.
    """

    max_response_tokens: int
    buffer_tokens: int
    penalty: float

    def __call__(self, num_tokens: int) -> float:
        """Return the addend to the reward for `num_tokens` sampled tokens: linear from 0.0 to -penalty."""
        num_over = num_tokens - (self.max_response_tokens - self.buffer_tokens)
        return -min(num_over / self.buffer_tokens, 1.0) * self.penalty if num_over > 0 else 0.0


@dataclass(frozen=True)
class Scorer:
    """Validates and scores samples; a faulty sample gets a `Fault` in place of a reward.

    Attributes:
        scores_groups: The reward gets all responses to a prompt at once: call `score_group`, not `score`.
    """

    tokenizer: Tokenizer
    rewards: RewardScorer
    needs_routes: bool
    validate_routes: RouteValidator | None
    overlong: OverlongShaping | None = None
    scores_groups: bool = False

    async def score(self, prompt: Prompt, sample: Sample, episode: Episode | None) -> Sample | Fault:
        """Return a sample with its reward, or its first fault; several calls may run at once.

        A reward worker scores the sample only if it is sound and its environment gave no reward.
        """
        checked = self._check(sample, episode)
        if isinstance(checked, Fault) or checked.reward is not None:
            return checked
        result = await self.rewards.score_one(self._request(prompt, sample, episode))
        return self._add_result(checked, result)

    async def score_group(
        self, prompt: Prompt, answers: Sequence[tuple[Sample, Episode | None]]
    ) -> list[Sample | Fault]:
        """Score all responses to a prompt; the reward gets those that need a score at once. See `score`."""
        scored = [self._check(*answer) for answer in answers]
        due = {n: each for n, each in enumerate(scored) if isinstance(each, Sample) and each.reward is None}
        if due:
            results = await self.rewards.score_group([self._request(prompt, *answers[n]) for n in due])
            for (n, sample), result in zip(due.items(), results, strict=True):
                scored[n] = self._add_result(sample, result)
        return scored

    def like(self, first: Sample, others: Iterable[Sample]) -> list[Sample]:
        """Return other samples of an episode with its reward, those that can be trained on."""
        shared: Any = {"reward": first.reward, "reward_info": first.reward_info}
        return [dataclasses.replace(each, **shared) for each in others if self._fault(each) is None]

    def _add_result(self, sample: Sample, result: RewardResult | RewardFault) -> Sample | Fault:
        if isinstance(result, RewardFault):
            return Fault(result.kind, sample.id, result.message)
        return self._add_reward(sample, result.value, result.info)

    def _add_reward(self, sample: Sample, reward: float, more_info: Mapping[str, float]) -> Sample | Fault:
        """Return the sample with its reward (from an environment or a worker) plus any overlong penalty."""
        info = {**sample.reward_info, **more_info}
        if self.overlong is not None:
            info["overlong_penalty"] = self.overlong(int(sample.loss_mask.sum()))
            reward += info["overlong_penalty"]
        if not abs(reward) <= LARGEST_REWARD:  # also refuses NaN
            expected = f"expected a finite number of at most {LARGEST_REWARD:g} in magnitude"
            return Fault("reward_failed", sample.id, f"found a reward of {reward:g}; {expected}")
        return dataclasses.replace(sample, reward=reward, reward_info=info)

    def _request(self, prompt: Prompt, sample: Sample, episode: Episode | None) -> RewardRequest:
        if episode is not None:
            return RewardRequest(prompt, episode.response, sample.finish_reason)
        response = as_text(
            self.tokenizer, ids_of(sample.tokens)[sample.prompt_length :], has_special_tokens=False
        )
        return RewardRequest(prompt, response, sample.finish_reason)

    def _check(self, sample: Sample, episode: Episode | None) -> Sample | Fault:
        if episode is not None and episode.fault is not None:
            reason = "harness_failed" if episode.failed == "harness" else "environment_failed"
            return Fault(reason, sample.id, episode.fault)
        fault = self._fault(sample)
        if fault is not None:
            return fault
        if episode is None:
            return sample
        if episode.reward is None:
            return dataclasses.replace(sample, reward_info=dict(episode.info))
        return self._add_reward(sample, episode.reward, episode.info)

    def _fault(self, sample: Sample) -> Fault | None:
        if sample.finish_reason == "abort":
            return Fault("aborted", sample.id, f"the engine gave up after {sample.response_length} tokens")
        if _is_empty(sample):
            return Fault("empty_response", sample.id, f"finish_reason {sample.finish_reason!r}")
        if not sample.has_usable_log_probs:
            return Fault("non_finite_log_probs", sample.id, "NaN or infinity among the rollout's log-probs")
        if self.needs_routes and sample.routed_experts is None and sample.num_retractions:
            return Fault("retracted", sample.id, _retraction_fault(sample.num_retractions))
        if self.needs_routes and sample.routed_experts is None:
            return Fault("invalid_routes", sample.id, "routes were requested, but the engine returned none")
        try:
            if self.validate_routes is not None:
                self.validate_routes(sample)
        except RoutingReplayError as error:
            return Fault("invalid_routes", sample.id, str(error))
        return None


def as_text(tokenizer: Tokenizer, ids: Sequence[int], *, has_special_tokens: bool) -> str:
    """Decode token ids, with or without special tokens, and without cleaning up spaces."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=not has_special_tokens, clean_up_tokenization_spaces=False
    )


def ids_of(tokens: Tensor) -> list[int]:
    """Return token ids `[N]` int64 as a list."""
    return cast(list[int], tokens.tolist())  # pyright: ignore[reportUnknownMemberType]


def _retraction_fault(num_retractions: int) -> str:
    """Return a message with the reason why a retracted sample has no routes to replay, and a remedy."""
    times = "once" if num_retractions == 1 else f"{num_retractions} times"
    return (
        f"retracted {times} because the server's cache was full, and without routes that the weights of its "
        "tokens computed (lower sglang.max_running_requests, or give a server more cache with sglang.tp_size; "
        "megatron-dppo plan prints the share of responses to expect)"
    )


def _is_empty(sample: Sample) -> bool:
    """Return whether the policy sampled no token of a response; tokens of observations do not count."""
    was_sampled = any(span.stop > span.start for span in sample.weight_versions)
    return sample.response_length == 0 or (not was_sampled and not bool(sample.loss_mask.any()))


def training_reward(config: Config) -> str:
    """Return the reward that a run trains on, as `RewardChoice.text`."""
    data = config.data
    return RewardChoice(data.reward, data.reward_values, data.thinking, data.reward_retries).text


class EnvironmentAlone:
    """Scorer for runs that take every reward from the environment; implements `scoring.RewardScorer`."""

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return a fault for each response."""
        return [await self.score_one(request) for request in requests]

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """Return a fault, because only responses without a reward from their environment are scored."""
        found = "no reward of its environment"
        action = "Give a reward in a turn, or let data.reward name a function that scores the last response."
        message = f"found {found}; expected one, since data.reward = 'environment'. {action}"
        return RewardFault("reward_failed", f"prompt {request.prompt.id}: {message}")


@dataclass(frozen=True)
class ScoredTimeOuts:
    """Scorer that rewards a time-out with `value`; implements `scoring.RewardScorer`."""

    scorer: RewardScorer
    value: float

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return the results of all responses to a prompt, none of them a time-out."""
        return [self.valued(result) for result in await self.scorer.score_group(requests)]

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """Return the result of a response, which is no time-out."""
        return self.valued(await self.scorer.score_one(request))

    def valued(self, result: RewardResult | RewardFault) -> RewardResult | RewardFault:
        """Return a result that records whether it replaces a time-out; other faults stay faults."""
        if isinstance(result, RewardResult):
            return dataclasses.replace(result, info={**result.info, "timed_out": 0.0})
        return RewardResult(self.value, {"timed_out": 1.0}) if result.kind == "reward_timed_out" else result


class RewardPools:
    """Reward pools by name, for the life of a run; workers start with the first request."""

    def __init__(self, options: DataConfig, rewards: Iterable[str]) -> None:
        """Create a pool for each reward (a `RewardChoice.text`), with the limits of [data]."""
        self._if_timed_out = options.reward_if_timed_out
        self._pools = {
            reward: RewardPool(
                reward,
                num_workers=options.reward_workers,
                timeout_s=options.reward_timeout_s,
                memory_mb=options.reward_memory_mb,
                environment=options.worker_environment,
            )
            for reward in dict.fromkeys(rewards)
            if not RewardChoice.read(reward).is_environment
        }

    def of(self, reward: str) -> RewardScorer:
        """Return the scorer of a named reward."""
        if RewardChoice.read(reward).is_environment:
            return EnvironmentAlone()
        pool = self._pools[reward]
        return pool if self._if_timed_out is None else ScoredTimeOuts(pool, self._if_timed_out)

    def files(self, reward: str) -> FileDigests:
        """Return path and digest of each file that the workers of a named reward have read."""
        return self._pools[reward].files if reward in self._pools else set()

    def score(self, reward: str, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return the results of requests with a named reward, in order."""
        return self._pools[reward].score(requests)

    def start(self, first: Mapping[str, Prompt]) -> None:
        """Score one response with each reward, so that a faulty one stops the run before a model loads.

        The response is the reference answer; its reward does not matter. A reward of groups gets it twice.

        Args:
            first: One prompt per reward.
        """
        for reward, pool in self._pools.items():
            count = _TRIED_GROUP if RewardChoice.read(reward).scores_groups else 1
            request = RewardRequest(first[reward], first[reward].answer, "stop")
            result = pool.score_together([request] * count)[0]
            if isinstance(result, RewardFault):
                said = result.message
                raise RewardError(
                    f"data.reward: {reward!r} scores no response, not even the reference answer: {said}"
                )

    def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            pool.close()
