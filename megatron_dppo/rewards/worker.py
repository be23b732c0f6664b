"""The process that runs a reward: `python -m megatron_dppo.rewards.worker NAME MEMORY_MB`.

NAME is the name of a reward, or a `RewardChoice` as JSON. `workers.worker` is its main loop.
"""

from collections.abc import Callable

from megatron_dppo.rewards.base import RewardResult
from megatron_dppo.rewards.choice import RewardChoice, build_scorer
from megatron_dppo.rewards.pool import SERVICE, Answers, Requests
from megatron_dppo.workers.worker import run_worker

_MAX_MESSAGE = 2000  # characters of a fault's message


def load_reward(name: str) -> Callable[[Requests], Answers]:
    """Return the function that scores responses with the reward of that name."""
    score = build_scorer(RewardChoice.read(name))

    def answer(requests: Requests) -> Answers:
        found = score(requests)
        return [each if isinstance(each, RewardResult) else str(each)[:_MAX_MESSAGE] for each in found]

    return answer


if __name__ == "__main__":
    run_worker(SERVICE, load_reward)
