"""Keeps the reward workers of a run: one pool for each reward that training and evaluation name."""

from collections.abc import Iterable, Mapping, Sequence

from megatron_dppo.config.schema import Config, DataConfig
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards import RewardChoice, RewardFault, RewardPool, RewardRequest, RewardResult
from megatron_dppo.rollout.scoring import RewardScorer
from megatron_dppo.types import Prompt


def training_reward(config: Config) -> str:
    """Return the reward that a run learns from, as `RewardChoice.text`."""
    data = config.data
    return RewardChoice(data.reward, data.reward_values, data.thinking).text


class EnvironmentAlone:
    """Scores no response: every reward must come from the environment; implements `scoring.RewardScorer`."""

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """Return a fault for each request: it gets only responses that no environment rewarded."""
        found = "no reward of its environment"
        action = "Give a reward in a turn, or let data.reward name a function that scores the last response."
        message = f"found {found}; expected one, since data.reward = 'environment'. {action}"
        return [RewardFault("reward_failed", f"prompt {each.prompt.id}: {message}") for each in requests]


class RewardPools:
    """Reward pools by name, for the life of a run; workers start with the first request."""

    def __init__(self, options: DataConfig, rewards: Iterable[str]) -> None:
        """Create a pool for each of `rewards`, texts of `RewardChoice`s, with the limits of [data]."""
        self._pools = {
            reward: RewardPool(
                reward,
                num_workers=options.reward_workers,
                timeout_s=options.reward_timeout_s,
                memory_mb=options.reward_memory_mb,
            )
            for reward in dict.fromkeys(rewards)
            if not RewardChoice.read(reward).is_environment
        }

    def of(self, reward: str) -> RewardScorer:
        """Return the scorer of a named reward."""
        return EnvironmentAlone() if RewardChoice.read(reward).is_environment else self._pools[reward]

    def start(self, first: Mapping[str, Prompt]) -> None:
        """Score one response with each reward, so that a faulty one stops the run before a model loads.

        The response is the reference answer itself, whatever it earns.

        Args:
            first: A prompt for each reward.

        Raises:
            RewardError: A reward cannot be loaded, or gives no number.
        """
        for reward, pool in self._pools.items():
            (result,) = pool.score([RewardRequest(first[reward], first[reward].answer, "stop")])
            if isinstance(result, RewardFault):
                said = result.message
                raise RewardError(
                    f"data.reward: {reward!r} scores no response, not even the reference answer: {said}"
                )

    def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            pool.close()
