"""Runs environments, an instance for each trajectory, in this process or in worker processes.

A hang, a crash or a memory leak of an environment in a worker costs a sample, never the run.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

from megatron_dppo.environments.base import (
    Environment,
    EnvironmentFault,
    Maker,
    Observation,
    Trajectory,
    Turn,
)
from megatron_dppo.errors import EnvironmentFailedError
from megatron_dppo.runtime.user_code import describe_error
from megatron_dppo.workers.pool import Limits, WorkerPool
from megatron_dppo.workers.service import Service, WorkerFault

_MAX_LIVE = 4096  # instances that wait for their next turn, including instances of abandoned conversations


class Host:
    """The environments of one process, one for each open trajectory."""

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._live = OrderedDict[
            str, tuple[Environment, int]
        ]()  # by trajectory id, with the number of responses

    def reset(self, trajectory: Trajectory) -> Observation:
        """Return the first observation of a trajectory.

        Raises:
            EnvironmentFailedError: The environment raised, or returned no `Observation`.
        """
        return self._begin(trajectory)[1]

    def step(self, trajectory: Trajectory) -> Turn:
        """Return the environment's turn after the trajectory's last response.

        Raises:
            EnvironmentFailedError: The environment raised, or returned no valid `Turn`.
        """
        environment, num_told = self._live.pop(trajectory.id, (None, 0))
        if environment is None or num_told != len(trajectory.responses) - 1:
            environment, num_told = self._begin(trajectory)[0], 0
        turn: Any = None
        for response in trajectory.responses[num_told:]:
            turn = _check_turn(
                trajectory, _call(trajectory, environment.step, response.text, response.finish_reason)
            )
        if not turn.done:
            self._live[trajectory.id] = (environment, len(trajectory.responses))
            if len(self._live) > _MAX_LIVE:
                self._live.popitem(last=False)
        return turn

    def _begin(self, trajectory: Trajectory) -> tuple[Environment, Observation]:
        environment = _call(trajectory, self._make)
        opening = _call(trajectory, environment.reset, trajectory.prompt, trajectory.seed)
        if not isinstance(opening, Observation):
            raise _wrong(trajectory, f"a {type(opening).__name__} from reset", "an Observation")
        return environment, opening


class InProcess:
    """Runs trusted environments, which cannot hang, in this process; implements `Environments`."""

    def __init__(self, make: Maker) -> None:
        self._host = Host(make)

    def reset(self, trajectories: Sequence[Trajectory]) -> list[Observation | EnvironmentFault]:
        """See `Environments.reset`."""
        return [self._answer(self._host.reset, trajectory) for trajectory in trajectories]

    def step(self, trajectories: Sequence[Trajectory]) -> list[Turn | EnvironmentFault]:
        """See `Environments.step`."""
        return [self._answer(self._host.step, trajectory) for trajectory in trajectories]

    async def answer(self, trajectory: Trajectory) -> Turn | EnvironmentFault:
        """See `Environments.answer`; returns without waiting."""
        return self._answer(self._host.step, trajectory)

    def _answer(self, ask: Any, trajectory: Trajectory) -> Any:
        try:
            return ask(trajectory)
        except EnvironmentFailedError as error:
            return EnvironmentFault(str(error))


def _call(trajectory: Trajectory, function: Any, *arguments: Any) -> Any:
    """Call the user's code, and raise its exceptions, except MemoryError, as EnvironmentFailedError."""
    try:
        return function(*arguments)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(
            f"prompt {trajectory.prompt.id}: the environment raised {describe_error(error)}"
        ) from error


def _check_turn(trajectory: Trajectory, turn: Any) -> Turn:
    """Return the turn after checking its types and numbers."""
    if not isinstance(turn, Turn):
        raise _wrong(trajectory, f"a {type(turn).__name__} from step", "a Turn")
    observation: object = turn.observation
    if not isinstance(observation, str) and not (observation is None and turn.done):
        raise _wrong(
            trajectory, f"a Turn with observation {observation!r}, done {turn.done}", "text until it is done"
        )
    try:
        reward = None if turn.reward is None else float(turn.reward)
        info = {str(key): float(number) for key, number in turn.info.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _wrong(
            trajectory, f"a Turn with {describe_error(error)}", "numbers as reward and in info"
        ) from error
    numbers = {**info, "reward": reward or 0.0}
    wrong = {key: number for key, number in numbers.items() if not math.isfinite(number)}
    if wrong:
        raise _wrong(trajectory, str(wrong), "finite numbers")
    return Turn(cast("str | None", observation), reward, bool(turn.done), info)


def _wrong(trajectory: Trajectory, found: str, expected: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"prompt {trajectory.prompt.id}: found {found}; expected {expected}. Correct the environment."
    )


@dataclass(frozen=True)
class Answer:
    """What a worker sends for a trajectory: its first observation, or the turn after its last response."""

    opening: Observation | None = None
    turn: Turn | None = None


SERVICE = Service[Trajectory, Answer](
    module="megatron_dppo.environments.worker",
    request=Trajectory,
    answer=Answer,
    key="rollout.environment",
    noun="environment",
    option_prefix="data.reward_",
    error=EnvironmentFailedError,
    describe_request=lambda trajectory: f"prompt {trajectory.prompt.id}",
)


class EnvironmentPool(WorkerPool[Trajectory, Answer]):
    """Pool of workers that run environments; implements `Environments`.

    Any worker can process any trajectory: a worker without its instance recreates it.
    """

    def __init__(self, name: str, **limits: Unpack[Limits]) -> None:
        """Create the pool for the environment `name` of `rollout.environment`; see `WorkerPool`."""
        super().__init__(SERVICE, name, **limits)

    def reset(self, trajectories: Sequence[Trajectory]) -> list[Observation | EnvironmentFault]:
        """See `Environments.reset`."""
        return [_opening(answer) for answer in self.ask(trajectories)]

    def step(self, trajectories: Sequence[Trajectory]) -> list[Turn | EnvironmentFault]:
        """See `Environments.step`."""
        return [_turn(answer) for answer in self.ask(trajectories)]

    async def answer(self, trajectory: Trajectory) -> Turn | EnvironmentFault:
        """See `Environments.answer`."""
        return _turn(await self.ask_one(trajectory))


def _opening(answer: Answer | WorkerFault) -> Observation | EnvironmentFault:
    if isinstance(answer, WorkerFault):
        return EnvironmentFault(answer.message)
    return answer.opening or EnvironmentFault("its worker sent a turn; expected the first observation")


def _turn(answer: Answer | WorkerFault) -> Turn | EnvironmentFault:
    if isinstance(answer, WorkerFault):
        return EnvironmentFault(answer.message)
    return answer.turn or EnvironmentFault("its worker sent a first observation; expected a turn")
