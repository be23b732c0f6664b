"""Scores responses in worker processes: a reward that hangs, dies or eats memory costs one sample."""

from collections.abc import Collection, Mapping, Sequence

from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.base import RewardChoice, RewardFault, RewardFaultKind, RewardRequest, RewardResult
from megatron_dppo.types import Prompt
from megatron_dppo.workers.pool import WorkerPool
from megatron_dppo.workers.service import Fields, Service, WorkerFault, WorkerFaultKind, require_keys


def encode_request(request: RewardRequest) -> Fields:
    """Return the fields of a response to score."""
    return {"prompt": vars(request.prompt), "response": request.response, "finish": request.finish_reason}


def decode_request(fields: Fields) -> RewardRequest:
    """Return the response to score that has these fields."""
    prompt = fields["prompt"]
    if prompt["messages"] is not None:
        prompt["messages"] = tuple(prompt["messages"])
    return RewardRequest(Prompt(**prompt), fields["response"], fields["finish"])


def encode_result(result: RewardResult) -> Fields:
    """Return the fields of a score."""
    return {"value": result.value, "info": dict(result.info)}


def decode_result(fields: Fields) -> RewardResult:
    """Return the score that has these fields.

    Raises:
        ValueError: The fields are not the fields of a score.
    """
    found = require_keys(fields, "value", "info")
    return RewardResult(found["value"], found["info"])


_SERVICE = Service[RewardRequest, RewardResult](
    module="megatron_dppo.rewards.worker",
    key="data.reward",
    noun="reward",
    option_prefix="data.reward_",
    error=RewardError,
    describe_request=lambda request: f"prompt {request.prompt.id}",
    encode_request=encode_request,
    decode_answer=decode_result,
)
_KINDS: Mapping[WorkerFaultKind, RewardFaultKind] = {
    "failed": "reward_failed",
    "timed_out": "reward_timed_out",
    "out_of_memory": "reward_out_of_memory",
}


class RewardPool(WorkerPool[RewardRequest, RewardResult]):
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

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return a score for each request, in order. See `WorkerPool.ask`."""
        return [_fault(found) if isinstance(found, WorkerFault) else found for found in self.ask(requests)]

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """Return the score of one response, while others are scored."""
        found = await self.ask_one(request)
        return _fault(found) if isinstance(found, WorkerFault) else found

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _fault(fault: WorkerFault) -> RewardFault:
    return RewardFault(_KINDS[fault.kind], fault.message)
