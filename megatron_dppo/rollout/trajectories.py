"""Builds the trajectory sampler: an engine with environments, or with the user's own `rollout.generate`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from megatron_dppo.config.schema import DataConfig, RolloutConfig
from megatron_dppo.environments import (
    EnvironmentFault,
    EnvironmentPool,
    Environments,
    InProcess,
    Response,
    SingleTurn,
    Trajectory,
)
from megatron_dppo.errors import EnvironmentFailedError
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.multi_turn import MultiTurnEngine, TurnLimits
from megatron_dppo.rollout.user_generate import UserGenerate
from megatron_dppo.runtime.user_code import imported
from megatron_dppo.types import Prompt


class TrajectorySampler:
    """Samples trajectories as `rollout.environment` or `rollout.generate` says; owns the environments' workers.

    Attributes:
        engine: Samples trajectories for training and evaluation.
        environments: Give the first observation of each trajectory.
    """

    def __init__(
        self, options: RolloutConfig, data: DataConfig, engine: RolloutEngine, tokenizer: Any, hf_folder: Path
    ) -> None:
        """Build the sampler; starts no worker.

        Args:
            options: [rollout].
            data: [data]: the workers' number and limits are those of rewards.
            engine: Samples single turns; not owned.
            tokenizer: Of the model that the engine holds.
            hf_folder: Holds the model's config.json.

        Raises:
            ConfigError: There is no such function as `rollout.generate` names.
        """
        self._pool = environment_pool(options.environment, data)
        self.environments: Environments = self._pool or InProcess(SingleTurn)
        self.engine: RolloutEngine
        if options.generate is None:
            limits = TurnLimits(options.max_turns, options.max_turn_tokens)
            self.engine = MultiTurnEngine(engine, self.environments, tokenizer, limits)
        else:
            vocab_size = AutoConfig.from_pretrained(hf_folder, trust_remote_code=False).vocab_size
            function = imported("rollout.generate", options.generate)
            self.engine = UserGenerate(options.generate, function, engine, vocab_size)

    def start(self, first: Prompt) -> None:
        """Step the environment once, where it has workers, so that a faulty one stops the run.

        Raises:
            EnvironmentFailedError: It does not begin with this prompt, or does not answer.
            RewardError: It cannot be loaded.
        """
        if self._pool is not None:
            try_environment(self._pool, first)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


def environment_pool(name: str, data: DataConfig) -> EnvironmentPool | None:
    """Return workers for the environments; none for the single-turn one, which needs no worker."""
    if name == "single_turn":
        return None
    return EnvironmentPool(
        name, num_workers=data.reward_workers, timeout_s=data.reward_timeout_s, memory_mb=data.reward_memory_mb
    )


def try_environment(environments: Environments, prompt: Prompt) -> None:
    """Begin a trajectory of a prompt, and answer it with the reference answer.

    Raises:
        EnvironmentFailedError: The environment does not begin, or does not answer.
        RewardError: It cannot be loaded.
    """
    trajectory = Trajectory("trial", prompt)
    (opening,) = environments.reset([trajectory])
    if isinstance(opening, EnvironmentFault):
        raise EnvironmentFailedError(f"rollout.environment: it does not begin: {opening.message}")
    answered = replace(trajectory, responses=(Response(prompt.answer, "stop"),))
    (turn,) = environments.step([answered])
    if isinstance(turn, EnvironmentFault):
        raise EnvironmentFailedError(f"rollout.environment: it does not answer: {turn.message}")
