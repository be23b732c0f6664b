"""Interfaces of environments, their observations and turns, and the registry that configs name them by."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.user_code import import_named, problem_with_path
from megatron_dppo.types import FinishReason, Message, Prompt

_KEY = "rollout.environment"


@dataclass(frozen=True)
class Observation:
    """How a conversation opens. Exactly one of `text` and `messages` is set."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.messages is None), "an observation is either text or messages"


@dataclass(frozen=True)
class Turn:
    """An environment's reaction to a response.

    `reward` is the reward of this turn; a sample's reward is the sum over its turns. If no turn has a reward,
    `data.reward` scores the last response. `observation` is the text that the policy reads before its next
    response; it may be None in the last turn.
    """

    observation: str | None
    reward: float | None
    done: bool
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """One conversation: `reset` once, then `step` until it is done.

    Its results may depend only on the arguments of `reset` and of all calls of `step` so far. Use no clock, and
    no randomness except from the seed. If a worker is lost or a run is killed, a new instance gets the same
    responses again and must return the same results.
    """

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin the conversation, and return the first text that the policy reads.

        Args:
            prompt: Row of data.prompts.
            seed: Seed of the prompt, 0 to 2^31 - 1; the same for all its samples, in any run.
        """
        ...

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Process a response of the policy, and return the next turn.

        Args:
            response: Text without special tokens.
            finish_reason: Reason why sampling ended, "length" if the response was truncated.
        """
        ...


@dataclass(frozen=True)
class Response:
    """One response of the policy, as passed to an environment."""

    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class Trajectory:
    """A trajectory so far: the prompt and the policy's responses. Without responses it has not begun."""

    id: str
    prompt: Prompt
    responses: tuple[Response, ...] = ()

    @property
    def seed(self) -> int:
        """Seed for `Environment.reset`; it depends only on the prompt's id."""
        digest = hashlib.blake2b(self.prompt.id.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class EnvironmentFault:
    """The reason why an environment returned no turn: it raised, hung, or returned another type."""

    message: str


class Environments(Protocol):
    """The environments of all trajectories. A fault in one does not affect the others."""

    def reset(self, trajectories: Sequence[Trajectory]) -> list[Observation | EnvironmentFault]:
        """Return the first observation of each trajectory, in order."""
        ...

    def step(self, trajectories: Sequence[Trajectory]) -> list[Turn | EnvironmentFault]:
        """Return the environment's turn after each trajectory's last response, in order."""
        ...

    async def answer(self, trajectory: Trajectory) -> Turn | EnvironmentFault:
        """Return the environment's turn after a trajectory's last response; several calls may run at once."""
        ...


def append_to_prompt(prompt: Prompt, observation: str) -> Observation:
    """Return the prompt with an observation appended to its text or to its last message."""
    if prompt.text is not None:
        return Observation(f"{prompt.text} {observation}")
    assert prompt.messages is not None, "a prompt is either text or messages"
    *before, last = prompt.messages
    asked: Message = {**last, "content": f"{last['content']} {observation}"}
    return Observation(messages=(*before, asked))


Maker = Callable[[], Environment]
"""Makes a new environment."""

_AnyMaker = TypeVar("_AnyMaker", bound=Callable[..., object])
_registered: dict[str, Any] = {}
ENVIRONMENTS: Mapping[str, Any] = MappingProxyType(_registered)
"""Registered makers by name, read-only. A name that ends with ":" has a function from the rest to a `Maker`."""


def register(name: str) -> Callable[[_AnyMaker], _AnyMaker]:
    """Decorate an environment's class with its name in configs.

    A name that ends with ":" is a family of environments. It decorates a function that takes the text after the
    colon and returns a `Maker`.

    Raises:
        ConfigError: The name is already registered.
    """

    def add(maker: _AnyMaker) -> _AnyMaker:
        if name in _registered:
            found = f"a second registration of {name!r}"
            raise ConfigError(
                Problem("environments", found, "one environment per name", "Choose another name.")
            )
        _registered[name] = maker
        return maker

    return add


def problem_with(name: str) -> Problem | None:
    """Return the problem with an environment's name, or None; runs no user code."""
    family, colon, rest = name.partition(":")
    if name in _registered or (rest and f"{family}{colon}" in _registered):
        return None
    return problem_with_path(_KEY, name, "package.module:Class", sorted(_registered))


def environment(name: str) -> Maker:
    """Return the maker registered under `name`, or the class at "package.module:Class".

    Raises:
        ConfigError: The name does not exist; the message lists the registered names.
    """
    problem = problem_with(name)
    if problem is not None:
        raise ConfigError(problem)
    family, colon, rest = name.partition(":")
    if name in _registered:
        return _registered[name]
    if (maker := _registered.get(f"{family}{colon}")) is not None:
        return maker(rest)
    return import_named(_KEY, name)
