"""The process that runs a reward: `python -m megatron_dppo.rewards.worker NAME MEMORY_MB`.

NAME is the name of a reward, or a `RewardChoice` as JSON. `workers.worker` is its main loop.
"""

import sys

from megatron_dppo.rewards.choice import RewardChoice, build_scorer
from megatron_dppo.rewards.pool import decode_requests, encode_scores
from megatron_dppo.workers.worker import Answer, run_worker


def load_reward(name: str) -> Answer:
    """Return the function that scores responses with the reward of that name."""
    score = build_scorer(RewardChoice.read(name))
    return lambda fields: encode_scores(score(decode_requests(fields)))


if __name__ == "__main__":
    run_worker("data.reward", load_reward, sys.argv[1], int(sys.argv[2]))
