"""How responses are had from an engine: in conversations with an environment, or by the user's own function."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from megatron_dppo.config.schema import DataConfig, RolloutConfig
from megatron_dppo.environments import EnvironmentPool, Environments, InProcess, SingleTurn
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.user_generate import UserGenerate
from megatron_dppo.user_code import imported


class Dialogue:
    """An engine as `rollout.environment` or `rollout.generate` wants it used, and the environments' workers.

    Attributes:
        engine: What training and evaluation ask for responses.
        environments: Say how conversations open.
    """

    def __init__(
        self, options: RolloutConfig, data: DataConfig, engine: RolloutEngine, tokenizer: Any, hf_folder: Path
    ) -> None:
        """Start nothing yet.

        Args:
            options: [rollout].
            data: [data]: the workers' number and limits are those of rewards.
            engine: Samples single turns; not owned.
            tokenizer: Of the model that the engine holds.
            hf_folder: Holds the model's config.json.

        Raises:
            ConfigError: There is no such function as `rollout.generate` names.
        """
        self._pool = _environment_pool(options.environment, data)
        self.environments: Environments = self._pool or InProcess(SingleTurn)
        self.engine: RolloutEngine
        if options.generate is None:
            limits = TurnLimits(options.max_turns, options.max_turn_tokens)
            self.engine = Conversations(engine, self.environments, tokenizer, limits)
        else:
            vocab_size = AutoConfig.from_pretrained(hf_folder, trust_remote_code=False).vocab_size
            function = imported("rollout.generate", options.generate)
            self.engine = UserGenerate(options.generate, function, engine, vocab_size)

    def start(self) -> None:
        """Load the environment in one worker now, where it has any: one that cannot be loaded stops a run."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


def _environment_pool(name: str, data: DataConfig) -> EnvironmentPool | None:
    """Workers for the environments; none for the one that the package answers for itself."""
    if name == "single_turn":
        return None
    return EnvironmentPool(
        name, num_workers=data.reward_workers, timeout_s=data.reward_timeout_s, memory_mb=data.reward_memory_mb
    )
