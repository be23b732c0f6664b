"""The process that runs environments: `python -m megatron_dppo.environments.worker NAME MEMORY_MB`.

It lives as `rewards.worker` does, and holds the conversations' instances from turn to turn.
"""

import sys

from megatron_dppo.environments import environment
from megatron_dppo.environments.base import Observation, Turn
from megatron_dppo.environments.host import Host
from megatron_dppo.environments.wire import read_request, verdict_line
from megatron_dppo.errors import EnvironmentFailedError
from megatron_dppo.rewards.base import RewardFault
from megatron_dppo.rewards.worker import MAX_MESSAGE, Answer, main


def load_environment(name: str) -> Answer:
    """What answers for the environments of that name."""
    host = Host(environment(name))

    def reply(line: bytes) -> bytes:
        number, play = read_request(line)
        verdict: Observation | Turn | RewardFault
        try:
            verdict = host.step(play) if play.responses else host.reset(play)
        except EnvironmentFailedError as error:
            verdict = RewardFault("reward_failed", str(error)[:MAX_MESSAGE])
        return verdict_line(number, verdict)

    return reply


if __name__ == "__main__":
    main("rollout.environment", load_environment, sys.argv[1], int(sys.argv[2]))
