"""The reward workers of a run: one pool for each reward that training and evaluation name."""

from collections.abc import Iterable

from megatron_dppo.config.schema import Config, DataConfig
from megatron_dppo.rewards import RewardChoice, RewardPool


def training_reward(config: Config) -> str:
    """What a run learns from, as `RewardChoice.text`."""
    data = config.data
    return RewardChoice(data.reward, data.reward_values, data.thinking).text


class RewardPools:
    """Pools by reward, for the life of a run; workers start when there is work."""

    def __init__(self, options: DataConfig, rewards: Iterable[str]) -> None:
        """Say what to run: each of `rewards`, texts of `RewardChoice`s, in pools as [data] has them."""
        self._pools = {
            reward: RewardPool(
                reward,
                num_workers=options.reward_workers,
                timeout_s=options.reward_timeout_s,
                memory_mb=options.reward_memory_mb,
            )
            for reward in dict.fromkeys(rewards)
        }

    def of(self, reward: str) -> RewardPool:
        """The pool of a reward that was named."""
        return self._pools[reward]

    def start(self) -> None:
        """Load each reward in one worker now: one that cannot be loaded should stop a run before it samples.

        Raises:
            RewardError: One cannot be loaded.
        """
        for pool in self._pools.values():
            pool.start()

    def close(self) -> None:
        """End the workers."""
        for pool in self._pools.values():
            pool.close()
