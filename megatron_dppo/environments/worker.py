"""The process that runs environments: `python -m megatron_dppo.environments.worker NAME MEMORY_MB`.

Its main loop is `workers.worker.run_worker`. It keeps the instances of trajectories from turn to turn.
"""

from collections.abc import Callable

from megatron_dppo.environments import environment
from megatron_dppo.environments.base import Trajectory
from megatron_dppo.environments.pool import SERVICE, Answer, Host
from megatron_dppo.workers.worker import run_worker


def load_environment(name: str) -> Callable[[Trajectory], Answer]:
    """Return a function that runs the environment `name` for a trajectory's next observation or turn."""
    host = Host(environment(name))

    def answer(trajectory: Trajectory) -> Answer:
        if trajectory.responses:
            return Answer(turn=host.step(trajectory))
        return Answer(opening=host.reset(trajectory))

    return answer


if __name__ == "__main__":
    run_worker(SERVICE, load_environment)
