"""Interfaces of environments, their observations and turns, and the registry that configs name them by."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.user_code import imported, problem_with_path
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
    """What an environment says to a response.

    `reward` is this turn's; a sample's is their sum. Where no turn has one, `data.reward` scores the last
    response. `observation` is what the policy reads before its next response; a last turn needs none.
    """

    observation: str | None
    reward: float | None
    done: bool
    info: Mapping[str, float] = field(default_factory=dict[str, float])


class Environment(Protocol):
    """One conversation: `reset` once, then `step` until it is done.

    What it says must depend on its arguments and on what it was told before, and on nothing else: no clock, and
    no randomness but the seed's. A worker that was lost is replaced by one that tells a new instance the same
    responses again, and so is a run that was killed.
    """

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin, and say what the policy reads first.

        Args:
            prompt: The row of data.prompts that the conversation is about.
            seed: 0 to 2^31 - 1, of the prompt: all its samples begin alike, in any run.
        """
        ...

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        """Take the policy's response, as text without special tokens; "length" where it was cut."""
        ...


@dataclass(frozen=True)
class Response:
    """One turn of the policy, as an environment is told it."""

    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class Trajectory:
    """A trajectory so far: the prompt and the policy's responses; without responses it is still to begin."""

    id: str
    prompt: Prompt
    responses: tuple[Response, ...] = ()

    @property
    def seed(self) -> int:
        """What the environment is reset with: the prompt's own, whatever the run, the rollout or the sample."""
        digest = hashlib.blake2b(self.prompt.id.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class EnvironmentFault:
    """Why an environment says nothing: it raised, hung, or said what is no turn."""

    message: str


class Environments(Protocol):
    """The environments of all trajectories. What happens to one does not touch the others."""

    def reset(self, trajectories: Sequence[Trajectory]) -> list[Observation | EnvironmentFault]:
        """Return the first observation of each trajectory, in order."""
        ...

    def step(self, trajectories: Sequence[Trajectory]) -> list[Turn | EnvironmentFault]:
        """Return the turn that answers each trajectory's last response, in order."""
        ...

    async def answer(self, trajectory: Trajectory) -> Turn | EnvironmentFault:
        """Return the turn that answers one trajectory's last response, while others are answered."""
        ...


@dataclass(frozen=True)
class Episode:
    """The outcome of a trajectory: `reward` is None where `data.reward` is to score `response`."""

    response: str  # the last one
    num_turns: int = 1
    reward: float | None = None
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str | None = None  # of its environment


def opened(prompt: Prompt, observation: str) -> Observation:
    """The prompt, with an observation behind it: in its text, or in its last message."""
    if prompt.text is not None:
        return Observation(f"{prompt.text} {observation}")
    assert prompt.messages is not None, "a prompt is either text or messages"
    *before, last = prompt.messages
    asked: Message = {**last, "content": f"{last['content']} {observation}"}
    return Observation(messages=(*before, asked))


Maker = Callable[[], Environment]
"""Makes an environment that no conversation has begun in."""

_AnyMaker = TypeVar("_AnyMaker", bound=Callable[..., object])
_registered: dict[str, Any] = {}
ENVIRONMENTS: Mapping[str, Any] = MappingProxyType(_registered)
"""Every registered `Maker` by name, read-only; where a name ends with ":", a function from its rest to one."""


def register(name: str) -> Callable[[_AnyMaker], _AnyMaker]:
    """Decorate an environment's class with the name that configs use.

    A name that ends with ":" is a family: what is decorated is a function, which is given what stands behind
    the colon and returns a `Maker`.

    Raises:
        ConfigError: The name is taken.
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
    """What is wrong with an environment's name, as far as can be told without running a user's code."""
    family, colon, rest = name.partition(":")
    if name in _registered or (rest and f"{family}{colon}" in _registered):
        return None
    return problem_with_path(_KEY, name, "package.module:Class", sorted(_registered))


def environment(name: str) -> Maker:
    """The maker registered under `name`, or the class that "package.module:Class" names.

    Raises:
        ConfigError: There is none of that name; the message says what there is.
    """
    problem = problem_with(name)
    if problem is not None:
        raise ConfigError(problem)
    family, colon, rest = name.partition(":")
    if name in _registered:
        return _registered[name]
    if (maker := _registered.get(f"{family}{colon}")) is not None:
        return maker(rest)
    return imported(_KEY, name)
