"""Scores responses in worker processes: a reward that hangs, dies or eats memory costs one sample."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardFault, RewardFaultKind, RewardRequest, RewardResult
from megatron_dppo.rewards.choice import RewardChoice
from megatron_dppo.runtime.user_code import advice_on_variables
from megatron_dppo.types import Prompt
from megatron_dppo.workers.pool import WorkerPool
from megatron_dppo.workers.service import Fields, Service, WorkerFault, WorkerFaultKind, require_keys

_MAX_MESSAGE = 2000  # characters of a fault's message
Requests = Sequence[RewardRequest]
Scores = list[RewardResult | RewardFault]


def encode_requests(requests: Requests) -> Fields:
    """Return the fields of responses to score together."""
    return {"responses": [_encode(request) for request in requests]}


def _encode(request: RewardRequest) -> Fields:
    return {"prompt": vars(request.prompt), "response": request.response, "finish": request.finish_reason}


def decode_requests(fields: Fields) -> list[RewardRequest]:
    """Return the responses to score that have these fields."""
    return [_decode(each) for each in fields["responses"]]


def _decode(fields: Fields) -> RewardRequest:
    prompt = fields["prompt"]
    if prompt["messages"] is not None:
        prompt["messages"] = tuple(prompt["messages"])
    return RewardRequest(Prompt(**prompt), fields["response"], fields["finish"])


def encode_scores(scores: Sequence[RewardResult | RewardError]) -> Fields:
    """Return the fields of scores."""
    return {
        "scores": [
            {"value": score.value, "info": dict(score.info)}
            if isinstance(score, RewardResult)
            else {"failed": str(score)[:_MAX_MESSAGE]}
            for score in scores
        ]
    }


def decode_scores(fields: Fields) -> Scores:
    """Return the scores that have these fields.

    Raises:
        ValueError: The fields are not the fields of scores.
    """
    return [_decode_score(each) for each in require_keys(fields, "scores")["scores"]]


def _decode_score(fields: Fields) -> RewardResult | RewardFault:
    if "failed" in fields:
        return RewardFault("reward_failed", fields["failed"])
    found = require_keys(fields, "value", "info")
    return RewardResult(found["value"], found["info"])


def _describe(requests: Requests) -> str:
    group = f", a group of {len(requests)}" if len(requests) > 1 else ""
    return f"prompt {requests[0].prompt.id}{group}"


_SERVICE = Service[Requests, Scores](
    module="megatron_dppo.rewards.worker",
    key="data.reward",
    noun="reward",
    option_prefix="data.reward_",
    error=RewardError,
    describe_request=_describe,
    encode_request=encode_requests,
    decode_answer=decode_scores,
)
_KINDS: Mapping[WorkerFaultKind, RewardFaultKind] = {
    "failed": "reward_failed",
    "timed_out": "reward_timed_out",
    "out_of_memory": "reward_out_of_memory",
}


class RewardPool(WorkerPool[Requests, Scores]):
    """Workers that score responses."""

    def __init__(
        self,
        choice: str | RewardChoice,
        *,
        num_workers: int,
        timeout_s: float,
        memory_mb: int,
        environment: Collection[str] = (),
    ) -> None:
        """Start the workers, see `WorkerPool`. `choice` is a `RewardChoice`, its text, or a reward's name."""
        name = choice if isinstance(choice, str) else choice.text
        super().__init__(
            _SERVICE,
            name,
            num_workers=num_workers,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            environment=environment,
        )

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

    def _scores(self, found: Scores | WorkerFault, count: int) -> Scores:
        """Return the worker's scores, or its fault for each response."""
        if isinstance(found, WorkerFault):
            return [RewardFault(_KINDS[found.kind], found.message)] * count
        return [self._with_advice(score) if isinstance(score, RewardFault) else score for score in found]

    def _with_advice(self, fault: RewardFault) -> RewardFault:
        return replace(fault, message=fault.message + advice_on_variables(fault.message, self._environment))

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
