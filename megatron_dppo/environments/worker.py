"""The process that runs environments: `python -m megatron_dppo.environments.worker NAME MEMORY_MB`.

It lives as `rewards.worker` does, and holds the conversations' instances from turn to turn.
"""

import sys

from megatron_dppo.environments import environment
from megatron_dppo.environments.base import Observation, Turn
from megatron_dppo.environments.host import Host
from megatron_dppo.environments.wire import answer_line, read_request
from megatron_dppo.errors import EnvironmentFailedError
from megatron_dppo.rewards.base import RewardFault
from megatron_dppo.rewards.worker import MAX_MESSAGE, Answer, main


def load_environment(name: str) -> Answer:
    """What answers for the environments of that name."""
    host = Host(environment(name))

    def reply(line: bytes) -> bytes:
        number, trajectory = read_request(line)
        answer: Observation | Turn | RewardFault
        try:
            answer = host.step(trajectory) if trajectory.responses else host.reset(trajectory)
        except EnvironmentFailedError as error:
            answer = RewardFault("reward_failed", str(error)[:MAX_MESSAGE])
        return answer_line(number, answer)

    return reply


if __name__ == "__main__":
    main("rollout.environment", load_environment, sys.argv[1], int(sys.argv[2]))
