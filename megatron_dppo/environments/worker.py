"""The process that runs environments: `python -m megatron_dppo.environments.worker NAME MEMORY_MB`.

Its main loop is `workers.worker.run_worker`. It keeps the instances of trajectories from turn to turn.
"""

import sys

from megatron_dppo.environments import environment
from megatron_dppo.environments.pool import Host, decode_trajectory, encode_answer
from megatron_dppo.workers.service import Fields
from megatron_dppo.workers.worker import Answer, run_worker


def load_environment(name: str) -> Answer:
    """Return a function that runs the environment `name` for a trajectory's next observation or turn."""
    host = Host(environment(name))

    def answer(fields: Fields) -> Fields:
        trajectory = decode_trajectory(fields)
        return encode_answer(host.step(trajectory) if trajectory.responses else host.reset(trajectory))

    return answer


if __name__ == "__main__":
    run_worker("rollout.environment", load_environment, sys.argv[1], int(sys.argv[2]))
