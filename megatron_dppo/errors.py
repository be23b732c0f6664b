"""Exceptions for users. Each message states the found value, the expected value, and the remedy."""

import difflib
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MAX_SUGGESTED = 8  # names that begin with a found word; more of them are no suggestion


@dataclass(frozen=True)
class Problem:
    """One fault of the user's input: its place, the value found and expected, and the remedy.

    Attributes:
        where: Config key ("parallel.expert"), file, or file and line at fault.
        found: Value at that place.
        expected: Accepted values.
        action: Remedy, as an imperative sentence.
        details: Indented lines after the message: a table, or the first of many cases.
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
    """Return an action: suggest the choices that `word` may mean, or return `otherwise`.

    It suggests the choice that differs in case alone, or else a few that begin with `word`, or else the most
    similar one. Case never matters.

    Args:
        word: Found word.
        choices: Known words.
        otherwise: Action if no choice is similar.
        spelt: Function that formats a choice as the user would write it.
    """
    folded, by_folded = word.casefold(), {choice.casefold(): choice for choice in choices}
    begun = [name for name in by_folded if folded and name.startswith(folded)]
    likely = [folded] if folded in by_folded else begun
    if not 0 < len(likely) <= _MAX_SUGGESTED:
        likely = difflib.get_close_matches(folded, by_folded, n=1)
    return suggested([spelt(by_folded[name]) for name in likely]) if likely else otherwise


def suggested(spellings: Sequence[str]) -> str:
    """Return the question whether the user meant one of `spellings`."""
    return f"Did you mean {' or '.join(filter(None, (', '.join(spellings[:-1]), spellings[-1])))}?"


class MegatronDppoError(Exception):
    """Base of every error that this package raises on purpose."""


class DiskError(MegatronDppoError):
    """A file of the run could not be written: the disk is full, or fails in another way."""


class ConfigError(MegatronDppoError, ValueError):
    """The configuration, or an argument, is wrong; `problems` lists every fault at once."""

    def __init__(self, message: str | Problem | Sequence[Problem]) -> None:
        if isinstance(message, Problem):
            message = [message]
        self.problems: tuple[Problem, ...] = () if isinstance(message, str) else tuple(message)
        super().__init__(message if isinstance(message, str) else "\n".join(map(str, message)))


class StorageError(MegatronDppoError):
    """A file cannot be read or written now, because its disk, mount or file server fails: nothing is lost."""


OF_STORAGE = frozenset({errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO})
"""Error numbers of a disk, mount or file server that fails."""


class InUseError(ConfigError):
    """A process that may end soon still holds the run folder: the same command may work later."""


@contextmanager
def writing_to(key: str, path: Path) -> Iterator[None]:
    """Convert a failure to write in the body into a ConfigError that names the user's path.

    Args:
        key: Option or setting with the path.
        path: Path as the user gave it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in OF_STORAGE:
            raise
        found, expected = f"{path} ({error.strerror or error})", "a place that can be written"
        raise ConfigError(Problem(key, found, expected, "Choose another place, or make room.")) from error


class LaunchError(MegatronDppoError):
    """The processes of the job did not find each other, or cannot reach each other."""


class LayoutError(ConfigError):
    """The parallel layout does not divide the model, is silently wrong in Megatron, or is unproven."""


class DataError(MegatronDppoError):
    """A data set is missing, torn, or lacks the named columns; `problem` has the parts of the message."""

    def __init__(self, message: str | Problem) -> None:
        self.problem = message if isinstance(message, Problem) else None
        super().__init__(str(message))


class RewardError(MegatronDppoError):
    """A reward function failed, or did not return a finite number."""


class EnvironmentFailedError(MegatronDppoError):
    """An environment raised an error, or did not return a turn of a conversation."""


class AgentFailedError(MegatronDppoError):
    """An agent's harness raised an error, did not end, or cannot be loaded."""


class RolloutError(MegatronDppoError):
    """The rollout engine cannot do what was requested, or returned an unexpected result."""


class ServerError(RolloutError):
    """An SGLang server does not start, does not reply, refuses a request, or has an unknown version."""


class ShortageError(RolloutError):
    """This machine has too few open files, processes or ports; no server is at fault."""


class ReplyError(RolloutError):
    """An SGLang server's response does not match the request."""


class RoutingReplayError(MegatronDppoError):
    """Captured expert choices do not fit the tokens or the model that replays them."""


class WeightSyncError(MegatronDppoError):
    """The engine did not receive each tensor exactly once, or not the same bits."""


class ConversionError(MegatronDppoError):
    """A checkpoint does not contain the tensors of the model's weight table."""


class CheckpointError(MegatronDppoError):
    """A checkpoint is missing, torn, or belongs to another model."""


class KernelBuildError(MegatronDppoError):
    """The CUDA source of the loss cannot be compiled here: a compiler is missing, too old, or refuses it."""


class TrainingError(MegatronDppoError):
    """Training fails: losses or gradients are not finite, step after step."""


_OF_CLUSTER = (LaunchError, ServerError, StorageError, WeightSyncError)


def exit_status(error: BaseException) -> int:
    """Return the exit status for an error that ends a process: 2 if the user has to change something, else 1.

    The same command may succeed after status 1. Servers, networks and other processes fail without the user.
    """
    return 2 if isinstance(error, MegatronDppoError) and not isinstance(error, _OF_CLUSTER) else 1
