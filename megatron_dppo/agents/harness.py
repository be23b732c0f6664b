"""Runs harnesses in worker processes: one episode at a time in each process, which is killed with its group."""

import json
import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from megatron_dppo.config.rollout import AgentSource, HarnessSource
from megatron_dppo.errors import AgentFailedError, Problem
from megatron_dppo.runtime.process import host_bytes, num_files_left
from megatron_dppo.runtime.user_code import problem_with_path
from megatron_dppo.types import Prompt
from megatron_dppo.workers.pool import WorkerPool
from megatron_dppo.workers.service import Service

KEY = "rollout.agent.harness"
_COMMAND = "rollout.agent.command"
_FILES, _BYTES = 4, 128 << 20  # open files and memory of a harness's process and of its pipes
_OTHER_FILES = 256


@dataclass(frozen=True)
class AgentOutcome:
    """Result of an episode. If `reward` is None, `POST /v1/reward` or `data.reward` gives the reward."""

    reward: float | None = None
    info: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class EpisodeTask:
    """The task of one episode, with the policy's address."""

    prompt: Prompt
    base_url: str  # ends with /v1
    api_key: str
    workdir: str  # an empty folder, removed after the episode


def checked_outcome(found: Any) -> AgentOutcome:
    """Return the outcome that a harness returned or posted, after checking its types."""
    outcome = found if isinstance(found, AgentOutcome) else AgentOutcome(found)
    try:
        reward = None if outcome.reward is None else float(outcome.reward)
        info = {str(key): float(number) for key, number in outcome.info.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"found {found!r}; expected a number, an AgentOutcome or None") from error
    if not all(map(math.isfinite, [reward or 0.0, *info.values()])):
        raise ValueError(f"found {found!r}; expected finite numbers")
    return AgentOutcome(reward, info)


SERVICE = Service[EpisodeTask, AgentOutcome](
    module="megatron_dppo.agents.worker",
    request=EpisodeTask,
    answer=AgentOutcome,
    key=KEY,
    noun="harness",
    option_prefix="data.reward_",
    error=AgentFailedError,
    describe_request=lambda task: f"prompt {task.prompt.id}",
    fewer="rollout.prompts_per_rollout",
)


def most_open_episodes() -> int:
    """Return how many episodes may be open in this process at once, by the machine's open files and memory."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    by_memory = host_bytes() // 2 // _BYTES // num_processes
    return max(min((num_files_left() - _OTHER_FILES) // _FILES, by_memory), 1)


class HarnessPool(WorkerPool[EpisodeTask, AgentOutcome]):
    """Pool of workers that run harnesses, one for each open episode; the caller limits their time."""

    def __init__(
        self,
        harness: str | None,
        command: Sequence[str],
        *,
        memory_mb: int,
        environment: Collection[str],
    ) -> None:
        """Create the pool for a "module:function" or a command; see `WorkerPool`."""
        super().__init__(
            SERVICE,
            harness if harness is not None else json.dumps(list(command)),
            num_workers=most_open_episodes(),
            timeout_s=math.inf,
            memory_mb=memory_mb,
            environment=environment,
        )


def as_command(name: str) -> list[str] | None:
    """Return the command of a worker's name, or None if the name is a "module:function"."""
    return cast("list[str]", json.loads(name)) if name.startswith("[") else None


def problem_with_agent(source: AgentSource) -> Problem | None:
    """Return the problem with a harness or a command, or None; runs no user code."""
    if isinstance(source, HarnessSource):
        return problem_with_path(KEY, source.name, "package.module:function")
    program = source.words[0]
    if shutil.which(program) is None:
        return Problem(_COMMAND, repr(program), "a program on the PATH", "Correct the name, or install it.")
    return None
