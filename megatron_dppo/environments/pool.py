"""Runs environments in worker processes: a hang, a crash or a memory leak costs a sample, never the run."""

from collections.abc import Collection, Sequence
from typing import Any

from megatron_dppo.environments.base import EnvironmentFault, Observation, Response, Trajectory, Turn
from megatron_dppo.errors import EnvironmentFailedError
from megatron_dppo.types import Prompt
from megatron_dppo.workers.pool import WorkerPool
from megatron_dppo.workers.service import Fields, Service, WorkerFault, require_keys


def encode_trajectory(trajectory: Trajectory) -> Fields:
    """Return the fields of a request for a trajectory's first observation or next turn."""
    responses = [[response.text, response.finish_reason] for response in trajectory.responses]
    return {"id": trajectory.id, "prompt": vars(trajectory.prompt), "responses": responses}


def decode_trajectory(fields: Fields) -> Trajectory:
    """Return the trajectory that has these fields."""
    prompt = fields["prompt"] | {"messages": _messages(fields["prompt"]["messages"])}
    responses = tuple(Response(text, finish) for text, finish in fields["responses"])
    return Trajectory(fields["id"], Prompt(**prompt), responses)


def encode_answer(answer: Observation | Turn) -> Fields:
    """Return the fields of an observation or a turn."""
    if isinstance(answer, Observation):
        return {"opening": vars(answer)}
    return {"turn": vars(answer) | {"info": dict(answer.info)}}


def decode_answer(fields: Fields) -> Observation | Turn:
    """Return the observation or the turn that has these fields.

    Raises:
        ValueError: The fields have neither.
    """
    if "opening" in fields:
        return Observation(fields["opening"]["text"], _messages(fields["opening"]["messages"]))
    return Turn(**require_keys(fields, "turn")["turn"])


def _messages(found: Any) -> Any:
    return None if found is None else tuple(found)


_SERVICE = Service[Trajectory, Observation | Turn](
    module="megatron_dppo.environments.worker",
    key="rollout.environment",
    noun="environment",
    option_prefix="data.reward_",
    error=EnvironmentFailedError,
    describe_request=lambda trajectory: f"prompt {trajectory.prompt.id}",
    encode_request=encode_trajectory,
    decode_answer=decode_answer,
)


class EnvironmentPool(WorkerPool[Trajectory, Observation | Turn]):
    """Pool of workers that run environments; implements `Environments`.

    Any worker can process any trajectory: a worker without its instance recreates it.
    """

    def __init__(
        self,
        name: str,
        *,
        num_workers: int,
        timeout_s: float,
        memory_mb: int,
        environment: Collection[str] = (),
    ) -> None:
        """Create the pool for the environment `name` of `rollout.environment`; see `WorkerPool`."""
        super().__init__(
            _SERVICE,
            name,
            num_workers=num_workers,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            environment=environment,
        )

    def reset(self, trajectories: Sequence[Trajectory]) -> list[Observation | EnvironmentFault]:
        """See `Environments.reset`."""
        return [
            answer if isinstance(answer, Observation) else _fault(answer) for answer in self.ask(trajectories)
        ]

    def step(self, trajectories: Sequence[Trajectory]) -> list[Turn | EnvironmentFault]:
        """See `Environments.step`."""
        return [answer if isinstance(answer, Turn) else _fault(answer) for answer in self.ask(trajectories)]

    async def answer(self, trajectory: Trajectory) -> Turn | EnvironmentFault:
        """See `Environments.answer`."""
        answer = await self.ask_one(trajectory)
        return answer if isinstance(answer, Turn) else _fault(answer)


def _fault(answer: Observation | Turn | WorkerFault) -> EnvironmentFault:
    assert isinstance(answer, WorkerFault), "a worker replies to its request"
    return EnvironmentFault(answer.message)
