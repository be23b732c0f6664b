"""The exceptions users see. Each message says what was found, what was expected, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with what the user gave us.

    Attributes:
        where: The config key ("parallel.expert"), file, or file and line that is at fault.
        found: What stands there.
        expected: What would be accepted.
        action: What to do about it, as an imperative sentence.
    """

    where: str
    found: str
    expected: str
    action: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; expected {self.expected}. {self.action}"


class MegatronDppoError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(MegatronDppoError, ValueError):
    """The configuration, or an argument, is wrong; `problems` lists every fault at once."""

    def __init__(self, message: str | Problem | Sequence[Problem]) -> None:
        if isinstance(message, Problem):
            message = [message]
        self.problems: tuple[Problem, ...] = () if isinstance(message, str) else tuple(message)
        super().__init__(message if isinstance(message, str) else "\n".join(map(str, message)))


class LaunchError(MegatronDppoError):
    """The processes of the job did not find each other."""


class LayoutError(ConfigError):
    """The parallel layout does not divide the model, is silently wrong in Megatron, or is unproven."""


class DataError(MegatronDppoError):
    """A data set is missing, torn, or lacks the named columns."""


class RewardError(MegatronDppoError):
    """A reward function failed or returned something that is no finite number."""


class EnvironmentFailedError(MegatronDppoError):
    """An environment raised, or said something that is no turn of a conversation."""


class RolloutError(MegatronDppoError):
    """The rollout engine cannot do what was asked, or returned something that does not fit."""


class ServerError(RolloutError):
    """An SGLang server does not start, does not answer, refuses, or is of an unknown version."""


class ReplyError(RolloutError):
    """An SGLang server's answer is not one to what it was asked."""


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
