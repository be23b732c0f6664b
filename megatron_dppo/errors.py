"""Exceptions for users. Each message says what was found, what was expected, and what to do."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One fault of the user's input: its place, the value found and expected, and the remedy.

    Attributes:
        where: The config key ("parallel.expert"), file, or file and line that is at fault.
        found: What stands there.
        expected: What would be accepted.
        action: What to do about it, as an imperative sentence.
        details: Lines that follow, indented: a table, or the first of many cases.
    """

    where: str
    found: str
    expected: str
    action: str
    details: str = ""

    def __str__(self) -> str:
        sentence = f"{self.where}: found {self.found}; expected {self.expected}. {self.action}"
        return f"{sentence}\n{self.details}" if self.details else sentence


def did_you_mean(word: str, choices: Iterable[str], otherwise: str, spelt: Callable[[str], str] = repr) -> str:
    """Return an action: ask whether the choice that `word` resembles was meant, or say what to do otherwise.

    Args:
        word: What was found.
        choices: What is known.
        otherwise: The action where no choice is similar.
        spelt: Spells a choice as the user would write it.
    """
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f"Did you mean {spelt(close[0])}?" if close else otherwise


class MegatronDppoError(Exception):
    """Base of every error this package raises on purpose."""


class DiskError(MegatronDppoError):
    """A file of the run could not be written: the disk is full, or fails in another way."""


class ConfigError(MegatronDppoError, ValueError):
    """The configuration, or an argument, is wrong; `problems` lists every fault at once."""

    def __init__(self, message: str | Problem | Sequence[Problem]) -> None:
        if isinstance(message, Problem):
            message = [message]
        self.problems: tuple[Problem, ...] = () if isinstance(message, str) else tuple(message)
        super().__init__(message if isinstance(message, str) else "\n".join(map(str, message)))


@contextmanager
def writing_to(key: str, path: Path) -> Iterator[None]:
    """Turn a failure to write in the body into a ConfigError that names the user's path.

    Args:
        key: The option or setting that holds the path.
        path: As it was given.

    Raises:
        ConfigError: The body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        found, expected = f"{path} ({error.strerror or error})", "a place that can be written"
        raise ConfigError(Problem(key, found, expected, "Choose another place, or make room.")) from error


class LaunchError(MegatronDppoError):
    """The processes of the job did not find each other."""


class LayoutError(ConfigError):
    """The parallel layout does not divide the model, is silently wrong in Megatron, or is unproven."""


class DataError(MegatronDppoError):
    """A data set is missing, torn, or lacks the named columns; `problem` has the parts of the message."""

    def __init__(self, message: str | Problem) -> None:
        self.problem = message if isinstance(message, Problem) else None
        super().__init__(str(message))


class RewardError(MegatronDppoError):
    """A reward function failed or returned something that is no finite number."""


class EnvironmentFailedError(MegatronDppoError):
    """An environment raised, or returned something that is no turn of a conversation."""


class RolloutError(MegatronDppoError):
    """The rollout engine cannot do what was asked, or returned something that does not fit."""


class ServerError(RolloutError):
    """An SGLang server does not start, does not answer, refuses, or is of an unknown version."""


class ReplyError(RolloutError):
    """An SGLang server's answer does not match its request."""


class RoutingReplayError(MegatronDppoError):
    """Captured expert choices do not fit the tokens or the model they would be replayed on."""


class WeightSyncError(MegatronDppoError):
    """The engine did not receive each tensor exactly once, or not the same bits."""


class ConversionError(MegatronDppoError):
    """A checkpoint does not hold what the model's weight table asks for."""


class CheckpointError(MegatronDppoError):
    """A checkpoint is missing, torn, or of another model."""


class KernelBuildError(MegatronDppoError):
    """The CUDA source of the loss cannot be compiled here: a compiler is missing, too old, or refuses it."""


class TrainingError(MegatronDppoError):
    """Training itself goes wrong: losses or gradients are not finite, step after step."""


class TraceError(MegatronDppoError):
    """A traced step needs values that a trace does not compute, or the process that ran it ended."""
