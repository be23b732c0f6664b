"""Scores responses in worker processes: a reward that hangs, dies or eats memory costs one sample."""

from collections.abc import Mapping, Sequence
from typing import Unpack

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardFault, RewardFaultKind, RewardRequest, RewardResult
from megatron_dppo.rewards.choice import RewardChoice
from megatron_dppo.runtime.user_code import advice_on_variables
from megatron_dppo.workers.pool import Limits, WorkerPool
from megatron_dppo.workers.service import Service, WorkerFault, WorkerFaultKind

Requests = Sequence[RewardRequest]
Scores = list[RewardResult | RewardFault]
Answers = list[RewardResult | str]
"""A worker's result for each response, or why there is none."""


def _describe(requests: Requests) -> str:
    group = f", a group of {len(requests)}" if len(requests) > 1 else ""
    return f"prompt {requests[0].prompt.id}{group}"


SERVICE = Service[Requests, Answers](
    module="megatron_dppo.rewards.worker",
    request=list[RewardRequest],
    answer=Answers,
    key="data.reward",
    noun="reward",
    option_prefix="data.reward_",
    error=RewardError,
    describe_request=_describe,
)
_KINDS: Mapping[WorkerFaultKind, RewardFaultKind] = {
    "failed": "reward_failed",
    "timed_out": "reward_timed_out",
    "out_of_memory": "reward_out_of_memory",
}


class RewardPool(WorkerPool[Requests, Answers]):
    """Workers that score responses."""

    def __init__(self, choice: str | RewardChoice, **limits: Unpack[Limits]) -> None:
        """Start the workers, see `WorkerPool`. `choice` is a `RewardChoice`, its text, or a reward's name."""
        super().__init__(SERVICE, choice if isinstance(choice, str) else choice.text, **limits)

    def score(self, requests: Requests) -> Scores:
        """Return a score for each request, in order; each is scored by itself. See `WorkerPool.ask`."""
        found = self.ask([(request,) for request in requests])
        return [score for scores in found for score in self._scores(scores, 1)]

    def score_together(self, requests: Requests) -> Scores:
        """Return the scores of responses to one prompt, as `score_group` does."""
        (found,) = self.ask([requests])
        return self._scores(found, len(requests))

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """Return the score of one response, while others are scored."""
        (score,) = await self.score_group((request,))
        return score

    async def score_group(self, requests: Requests) -> Scores:
        """Return the scores of responses to one prompt, which a reward of whole groups gets at once."""
        return self._scores(await self.ask_one(requests), len(requests))

    def _scores(self, found: Answers | WorkerFault, count: int) -> Scores:
        """Return the worker's scores, or its fault for each response."""
        if isinstance(found, WorkerFault):
            return [RewardFault(_KINDS[found.kind], found.message)] * count
        return [self._fault(each) if isinstance(each, str) else each for each in found]

    def _fault(self, message: str) -> RewardFault:
        return RewardFault("reward_failed", message + advice_on_variables(message, self._environment))

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
