"""The process that runs a reward: `python -m megatron_dppo.rewards.worker NAME MEMORY_MB`.

NAME is the name of a reward, or a `RewardChoice` as JSON. `workers.worker` is its main loop.
"""

import sys

from megatron_dppo.rewards.base import RewardChoice, build_reward, call_reward
from megatron_dppo.rewards.pool import decode_request, encode_result
from megatron_dppo.workers.worker import Answer, run_worker


def load_reward(name: str) -> Answer:
    """Return the function that scores responses with the reward of that name."""
    reward = build_reward(RewardChoice.read(name))
    return lambda fields: encode_result(call_reward(reward, decode_request(fields)))


if __name__ == "__main__":
    run_worker("data.reward", load_reward, sys.argv[1], int(sys.argv[2]))
