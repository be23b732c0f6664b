"""SLURM's jobs on two of three nodes, and faults: rows and weights must equal a run on one node."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.faults.campaign import compare_rows, equal_states
from tests.nodes.lab import Lab
from tests.nodes.training import OPTIONS, num_trained
from tests.support.cluster import Cluster
from tests.support.jobs import Job, overrides_of, stand_in_environment, submit
from tests.support.records import metrics_of

TRAIN = ("examples/moe_base/train.sbatch", "dppo_binary_tv.toml")
_LIMIT_S = 1200


def start(cluster: Cluster, run: Path, tiny: tuple[str, ...]) -> Job:
    """A job that trains on two nodes."""
    overrides = overrides_of(OPTIONS | {"run.folder": run, "run.peer_timeout_s": 20})
    return submit(cluster, run.parent, "--nodes=2", *TRAIN, *tiny, *overrides)


def wait_for_training(job: Job, run: Path, num_rollouts: int) -> None:
    """Until so many rollouts are trained on."""

    def has_trained() -> bool:
        assert "FAILED" not in job.states, job.output
        return num_trained(run) >= num_rollouts

    job.cluster.wait_until(has_trained, _LIMIT_S, f"job {job.id} trains; output:\n{job.output}")


def trainer_log(job: Job, run: Path, attempt: int) -> str:
    log = run / "slurm" / f"{job.id}-attempt_{attempt}" / "trainer.log"
    return log.read_text(errors="replace") if log.exists() else ""


def wait_for_attempt(job: Job, run: Path, attempt: int) -> None:
    """Until an attempt has resumed the run, and trained on two rollouts."""

    def has_trained() -> bool:
        assert "FAILED" not in job.states, job.output
        return len(re.findall(r"resuming from|rollout +\d+/", trainer_log(job, run, attempt))) >= 3

    job.cluster.wait_until(has_trained, _LIMIT_S, f"job {job.id}, attempt {attempt}; output:\n{job.output}")


def test_a_job_survives_dead_and_slow_links_dead_nodes_and_one_that_cannot_be_reached(
    lab: Lab, cluster: Cluster, tiny: tuple[str, ...], one_machine: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start(cluster, run, tiny)
    wait_for_training(job, run, 1)
    lab.cut("n1")
    time.sleep(5)
    lab.mend()
    lab.delay(0.02)
    wait_for_training(job, run, 4)
    lab.delay(0)
    lab.nodes["n1"].kill()
    wait_for_attempt(job, run, 1)
    lab.cut("n0")  # rank 0 there lives, and holds the run folder until it notices that its peer is gone
    try:
        lab.start("n1")
        cluster.start_node("n1")
        wait_for_attempt(job, run, 2)
    finally:
        lab.nodes["n0"].kill()
    assert job.hosts == "n[1-2]"
    lab.mend()
    lab.start("n0")
    cluster.start_node("n0")
    lab.nodes["n1"].kill()  # with the job's script and rank 0, which held the run folder
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert re.search(r"rank 1 \(host n1, pid \d+\)", trainer_log(job, run, 0))
    assert job.hosts == "n[0,2]" and "resuming from" in trainer_log(job, run, 3)
    assert compare_rows(one_machine, run) == (0, 0)
    assert equal_states(one_machine, run)


def test_job_survives_a_dead_link_of_5_s_to_its_server_node(
    lab: Lab, cluster: Cluster, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """Rank 0 and 1 on n0 and n1, a stand-in for a server on n2, and weights by the common disk."""
    run, num_rollouts = tmp_path / "run", 4
    options = OPTIONS | {
        "run.folder": run,
        "run.num_rollouts": num_rollouts,
        "rollout.engine": "sglang",
        "rollout.sglang.colocated": "false",
        "rollout.sglang.weight_sync": "disk",
        "rollout.sglang.probe_every": 0,
    }
    environment = stand_in_environment(tmp_path, "stand_in_servers.sh")
    environment |= {"NUM_ENGINE_NODES": "1", "SERVERS_PER_NODE": "1"}
    job = submit(cluster, tmp_path, "--nodes=3", *TRAIN, *tiny, *overrides_of(options), **environment)
    wait_for_training(job, run, 1)
    (record,) = run.glob("servers/node-*.json")
    assert json.loads(record.read_text())["url"].startswith("http://n2:")
    lab.cut("n2")
    time.sleep(5)
    lab.mend()
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert [row["rollout"] for row in metrics_of(run, "rollout")] == list(range(num_rollouts))
    engine = (run / "slurm" / f"{job.id}-attempt_0" / "engine.log").read_text()
    assert f"n2: ended with weights {num_rollouts}" in engine


def start_stand_in(cluster: Cluster, run: Path, tiny: tuple[str, ...]) -> Job:
    """A job of two ranks that only wait for their status."""
    environment = stand_in_environment(run.parent, "stand_in_ranks.sh") | {"STAND_IN_FOLDER": str(run)}
    overrides = overrides_of({"run.folder": run})
    return submit(cluster, run.parent, "--nodes=2", *TRAIN, *tiny, *overrides, **environment)


def write_statuses(run: Path, status: int) -> None:
    """End both ranks with this status."""
    for rank in range(2):
        (run / f"status_{rank}").write_text(str(status))


@pytest.mark.parametrize(("rank", "status"), [(0, 2), (1, 1)])
def test_job_exit_status_equals_the_failed_ranks(
    cluster: Cluster, tiny: tuple[str, ...], tmp_path: Path, rank: int, status: int
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / f"status_{rank}").write_text(str(status))
    job = start_stand_in(cluster, run, tiny)
    job.wait_for_state("FAILED", timeout_s=_LIMIT_S)
    assert job.exit_codes == [f"{status}:0"]


def test_a_job_is_requeued_once_the_controller_is_back(
    lab: Lab, cluster: Cluster, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """It is away while the ranks stop, and refuses the first request."""
    run = tmp_path / "run"
    job = start_stand_in(cluster, run, tiny)
    cluster.wait_until(
        lambda: {file.name for file in run.glob("begun_*")} == {"begun_0", "begun_1"},
        _LIMIT_S,
        "both ranks start",
    )
    cluster.stop_controller()
    try:
        write_statuses(run, 75)
        cluster.wait_until(lambda: "again in 10 s" in job.output, _LIMIT_S, "the request is refused")
        write_statuses(run, 0)
    finally:
        cluster.start_controller()
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert said.index("again in 10 s") < said.index("goes back to the queue") < said.index("attempt 1: 2 x 1 ")
