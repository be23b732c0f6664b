"""Where environments live: an instance for each conversation, kept, or made again from what was said."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

from megatron_dppo.environments.base import (
    Environment,
    EnvironmentFault,
    Maker,
    Observation,
    Play,
    Turn,
)
from megatron_dppo.errors import EnvironmentFailedError
from megatron_dppo.rewards.base import described

_MAX_LIVE = 4096  # instances that wait for their next turn; those of abandoned conversations are among them


class Host:
    """Environments of one process, one for each conversation that goes on."""

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._live = OrderedDict[
            str, tuple[Environment, int]
        ]()  # by conversation, with the responses it was told

    def reset(self, play: Play) -> Observation:
        """How a conversation opens.

        Raises:
            EnvironmentFailedError: The environment raised, or gave something else.
        """
        return self._begin(play)[1]

    def step(self, play: Play) -> Turn:
        """What is said to the conversation's last response.

        Raises:
            EnvironmentFailedError: The environment raised, or gave something else.
        """
        environment, num_told = self._live.pop(play.id, (None, 0))
        if environment is None or num_told != len(play.responses) - 1:
            environment, num_told = self._begin(play)[0], 0
        turn: Any = None
        for response in play.responses[num_told:]:
            turn = _checked_turn(play, _told(play, environment.step, response.text, response.finish_reason))
        if not turn.done:
            self._live[play.id] = (environment, len(play.responses))
            if len(self._live) > _MAX_LIVE:
                self._live.popitem(last=False)
        return turn

    def _begin(self, play: Play) -> tuple[Environment, Observation]:
        environment = _told(play, self._make)
        opening = _told(play, environment.reset, play.prompt, play.seed)
        if not isinstance(opening, Observation):
            raise _wrong(play, f"a {type(opening).__name__} from reset", "an Observation")
        return environment, opening


class InProcess:
    """Environments in this process, for those that are known to end; see `Environments`."""

    def __init__(self, make: Maker) -> None:
        self._host = Host(make)

    def reset(self, plays: Sequence[Play]) -> list[Observation | EnvironmentFault]:
        """See `Environments.reset`."""
        return [self._answered(self._host.reset, play) for play in plays]

    def step(self, plays: Sequence[Play]) -> list[Turn | EnvironmentFault]:
        """See `Environments.step`."""
        return [self._answered(self._host.step, play) for play in plays]

    def _answered(self, ask: Any, play: Play) -> Any:
        try:
            return ask(play)
        except EnvironmentFailedError as error:
            return EnvironmentFault(str(error))


def _told(play: Play, function: Any, *arguments: Any) -> Any:
    """What the user's code returns; what it raises becomes an EnvironmentFailedError, but for MemoryError."""
    try:
        return function(*arguments)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(
            f"prompt {play.prompt.id}: the environment raised {described(error)}"
        ) from error


def _checked_turn(play: Play, turn: Any) -> Turn:
    """The turn, once it is known to be one."""
    if not isinstance(turn, Turn):
        raise _wrong(play, f"a {type(turn).__name__} from step", "a Turn")
    observation: object = turn.observation
    if not isinstance(observation, str) and not (observation is None and turn.done):
        raise _wrong(
            play, f"a Turn with observation {observation!r}, done {turn.done}", "text until it is done"
        )
    try:
        reward = None if turn.reward is None else float(turn.reward)
        info = {str(key): float(number) for key, number in turn.info.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _wrong(play, f"a Turn with {described(error)}", "numbers as reward and in info") from error
    numbers = {**info, "reward": reward or 0.0}
    wrong = {key: number for key, number in numbers.items() if not math.isfinite(number)}
    if wrong:
        raise _wrong(play, str(wrong), "finite numbers")
    return Turn(cast("str | None", observation), reward, bool(turn.done), info)


def _wrong(play: Play, found: str, expected: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"prompt {play.prompt.id}: found {found}; expected {expected}. Correct the environment."
    )
