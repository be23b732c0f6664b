"""What jobs start, where, and what becomes of it; stand_in.sh takes the place of servers and trainer."""

from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.jobs import Job, stand_in_environment, submit

TRAIN = "examples/moe_base/train.sbatch"
ALGORITHM = "dppo_binary_tv.toml"
_LIMIT_S = 180


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder."""
    return tmp_path / "run"


def start(
    cluster: Cluster, run: Path, tiny: tuple[str, ...], *options: str, sets: tuple[str, ...] = (), **env: str
) -> Job:
    """A job with the stand-in."""
    stand_in = stand_in_environment(run.parent, "stand_in.sh")
    overrides = [part for value in (f"run.folder={run}", *sets) for part in ("--set", value)]
    command = (*options, TRAIN, ALGORITHM, *tiny, *overrides)
    return submit(cluster, run.parent, *command, **stand_in | {"STAND_IN_FOLDER": str(run)} | env)


@pytest.mark.parametrize(
    ("colocated", "num_engine_nodes", "num_trainer_nodes", "server_nodes"),
    [("false", "1", 1, ["n1", "n1"]), ("true", "0", 2, ["n0", "n0", "n1", "n1"])],
    ids=["on nodes of its own", "on the trainer's nodes"],
)
def test_an_engine_step_runs_beside_the_trainer(
    cluster: Cluster,
    tiny: tuple[str, ...],
    run: Path,
    colocated: str,
    num_engine_nodes: str,
    num_trainer_nodes: int,
    server_nodes: list[str],
) -> None:
    options = {
        "rollout.engine": "sglang",
        "rollout.sglang.colocated": colocated,
        "rollout.sglang.weight_sync": "disk",
        "sglang.tp_size": 4,
        "parallel.expert": 1,
    }
    sets = tuple(f"{name}={value}" for name, value in options.items())
    job = start(cluster, run, tiny, sets=sets, NUM_ENGINE_NODES=num_engine_nodes)
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    for index, node in enumerate(server_nodes):
        server = (run / "servers" / f"node-{index}.json").read_text()
        assert server.startswith(f"{node}: -m megatron_dppo serve examples/moe_base/base.toml")
        assert f"--name node-{index} " in server
        assert ("--set sglang.base_gpu_id=4 " in server) == (index % 2 == 1)
    logs = run / "slurm" / f"{job.id}-attempt_0"
    trainers = sorted((logs / "trainer.log").read_text().splitlines())
    command = f"-m torch.distributed.run --nnodes={num_trainer_nodes} --node-rank"
    expected = [f"n{rank}: {command}={rank}" for rank in range(num_trainer_nodes)]
    assert [line[: len(expected[0])] for line in trainers] == expected
    ended = sorted(line for line in (logs / "engine.log").read_text().splitlines() if line.endswith(": ended"))
    assert ended == [f"{node}: ended" for node in server_nodes]


def test_an_array_is_a_run_for_each_seed(cluster: Cluster, tiny: tuple[str, ...], run: Path) -> None:
    job = start(cluster, run, tiny, "--array=3,8", "--nodes=1", sets=("parallel.expert=1",))
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    for seed in (3, 8):
        (log,) = run.glob(f"seed_{seed}/slurm/*-attempt_0/trainer.log")
        command = log.read_text()
        assert f'--set run.seed={seed} --set run.folder="{run}/seed_{seed}"' in command


def test_a_config_with_problems_starts_no_rank(cluster: Cluster, tiny: tuple[str, ...], run: Path) -> None:
    job = start(cluster, run, tiny, sets=("rollout.top_p=0.9", "parallel.tensor=3"))
    said = job.wait_for_state("FAILED", timeout_s=_LIMIT_S)
    assert "ConfigError: " in said
    assert "rollout.top_p: found 0.9" in said
    assert "parallel.tensor" in said
    assert not (run / "begun").exists()


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, tiny: tuple[str, ...], run: Path) -> None:
    job = start(cluster, run, tiny, STAND_IN_SECONDS="100")
    cluster.wait_until((run / "begun").exists, _LIMIT_S, f"the trainer starts; it said:\n{job.output}")
    cluster.ask(["scancel", job.id])
    job.wait_for_state("CANCELLED", timeout_s=_LIMIT_S)
    assert "goes back to the queue" not in job.output


def test_a_preempted_job_that_saves_too_slowly_makes_room_and_comes_back(
    cluster: Cluster, tiny: tuple[str, ...], run: Path
) -> None:
    job = start(cluster, run, tiny, STAND_IN_SECONDS="100", SAVE_SECONDS="1")
    cluster.wait_until((run / "begun").exists, _LIMIT_S, f"the trainer starts; it said:\n{job.output}")
    urgent = submit(cluster, run.parent, "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=date")
    urgent.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert "attempt 0: asked to stop, and not saved in 1 s; the job goes back to the queue" in said
    assert "attempt 1: 2 x 1 processes" in said
