"""Real jobs that train a tiny model on two nodes: a pair and its report, a requeued job, a rank that fails."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.faults.campaign import compare_rows, equal_states
from tests.support.cluster import Cluster
from tests.support.jobs import ROOT, Job, environment_of_jobs, is_alive, stand_in_environment, submit
from tests.support.records import metrics_of

ALGORITHM = "dppo_binary_tv.toml"
_LIMIT_S = 1200


@pytest.fixture(scope="session")
def pair(cluster: Cluster, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pair of runs, done."""
    folder = tmp_path_factory.mktemp("pair")
    script = "examples/moe_base/r3_compare.sbatch"
    job = submit(cluster, folder / "outputs", script, ALGORITHM, *tiny, R3_FOLDER=str(folder), SEEDS="7")
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    match = re.search(r"measure: job (\d+); replay: job (\d+); then job (\d+)", said)
    assert match is not None, said
    assert Job(cluster, match[3], folder).states == ["PENDING"], "the report waits for the runs"
    for number in (1, 2, 3):
        Job(cluster, match[number], folder).wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    return folder


def test_a_pair_of_runs_and_their_report(pair: Path) -> None:
    for mode in ("measure", "replay"):
        run = pair / mode / "seed_7"
        assert [row["step"] for row in metrics_of(run, "step")] == list(range(24))
        config = (run / "config.toml").read_text()
        assert f'routing_replay = "{mode}"' in config
        assert "paired_routing_every = 10" in config
        assert "seed = 7" in config
    rewards = [
        [row["reward/mean"] for row in metrics_of(pair / mode / "seed_7", "rollout")]
        for mode in ("measure", "replay")
    ]
    assert rewards[0][0] == rewards[1][0], "the same seed samples the same responses"
    report = (pair / "report.html").read_text()
    assert "measure" in report
    assert "replay" in report


def test_a_grid_trains_an_array_for_each_value_and_compares_them(
    cluster: Cluster, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    out, (extra, *overrides) = tmp_path / "grid", tiny
    flags = ["--variant", ALGORITHM, str(Path(extra).resolve()), "--vary", "algorithm.delta=0.2,0.05"]
    command = [sys.executable, "-m", "megatron_dppo", "grid", *flags, *overrides]
    command += ["--set", "run.num_rollouts=1", "--seeds", "7", "-o", str(out)]
    command += ["--sbatch", "examples/moe_base/train.sbatch"]
    environment = environment_of_jobs(cluster)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arrays = re.findall(r"(delta_\S+): job (\d+), seeds 7$", done.stdout.replace("dppo_binary_tv-", ""), re.M)
    assert [name for name, _ in arrays] == ["delta_0.2", "delta_0.05"], done.stdout
    (report,) = re.findall(r"then job (\d+) writes", done.stdout)
    for number in (*(number for _, number in arrays), report):
        Job(cluster, number, out).wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    runs = sorted(path.parent for path in out.glob("*/seed_*/metrics.jsonl"))
    assert [run.name for run in runs] == ["seed_7", "seed_7"]
    for run in runs:
        config = tomllib.loads((run / "config.toml").read_text())
        assert f"delta_{config['algorithm']['delta']:g}" in run.parent.name
        assert f"seed_{config['run']['seed']}" == run.name
    text = (out / "report.html").read_text()
    assert all(delta in text for delta in ("0.05", "0.2"))


def test_a_signalled_job_is_requeued_and_resumes_bitwise(
    cluster: Cluster, tiny: tuple[str, ...], pair: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    script = "examples/moe_base/train.sbatch"
    sets = {"run.folder": run, "run.seed": 7, "rollout.routing_replay": "measure"}
    sets |= {"tracking.paired_routing_every": 10}  # as r3_compare.sbatch has it
    overrides = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    job = submit(cluster, tmp_path, script, ALGORITHM, *tiny, *overrides)
    log = run / "slurm" / f"{job.id}-attempt_0" / "trainer.log"
    wait_for_training(job, log)
    cluster.ask(["scancel", "--batch", "--signal=USR1", job.id])
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert "attempt 0: stopped and saved; the job goes back to the queue" in said
    assert "asked to stop: saved after" in log.read_text()
    assert "resuming from" in (run / "slurm" / f"{job.id}-attempt_1" / "trainer.log").read_text()
    assert compare_rows(pair / "measure" / "seed_7", run) == (0, 0)
    assert equal_states(pair / "measure" / "seed_7", run)


def test_an_asynchronous_job_is_requeued_and_resumes(
    cluster: Cluster, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    """A server on the last node, which is a stand-in, samples while the trainer on the first one trains."""
    run, num_rollouts, max_staleness = tmp_path / "run", 8, 3
    options = {
        "run.folder": run,
        "run.num_rollouts": num_rollouts,
        "rollout.engine": "sglang",
        "rollout.max_staleness": max_staleness,
        "rollout.over_sampling": 2,
        "rollout.sglang.weight_sync": "disk",
        "rollout.sglang.probe_every": 0,
        "parallel.expert": 1,
        "evaluation.every": 100,
        "tracking.samples_every": 1,
    }
    overrides = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    script = "examples/moe_base_async/train.sbatch"
    environment = stand_in_environment(tmp_path, "stand_in_servers.sh") | {
        "NUM_ENGINE_NODES": "1",
        "SERVERS_PER_NODE": "1",
    }
    job = submit(cluster, tmp_path, "--nodes=2", script, ALGORITHM, *tiny, *overrides, **environment)
    logs = [run / "slurm" / f"{job.id}-attempt_{attempt}" for attempt in range(2)]
    wait_for_training(job, logs[0] / "trainer.log", num_rollouts=2)
    cluster.ask(["scancel", "--batch", "--signal=USR1", job.id])
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert "attempt 0: stopped and saved; the job goes back to the queue" in said
    assert "asked to stop: saved after" in (logs[0] / "trainer.log").read_text()
    assert "resuming from" in (logs[1] / "trainer.log").read_text()
    for log in logs:
        ended = (log / "engine.log").read_text()
        assert "n1: ended with weights " in ended and "n0" not in ended
    rollouts = metrics_of(run, "rollout")
    assert [row["rollout"] for row in rollouts] == list(range(num_rollouts))
    ages = [row["rollout/staleness_max"] for row in rollouts]
    assert max(ages[:3]) >= 1, "sampled before a push, trained on after it"
    assert max(ages[-3:]) >= 1, "and so after the resume"
    assert max(ages) <= max_staleness
    assert rollouts[0]["engine/busy_in_training"] > 0
    assert sum(row["rollout/interrupted"] for row in rollouts) > 0
    files = [(run / "samples" / f"rollout_{rollout:06d}.jsonl").read_text() for rollout in range(num_rollouts)]
    of_rollouts = [{json.loads(line)["id"].partition("+")[0] for line in file.splitlines()} for file in files]
    places = sorted(int(place.removeprefix("place")) for places in of_rollouts for place in places)
    assert places == list(range(4 * num_rollouts)), "each prompt is trained on once"


def test_a_rank_that_dies_ends_the_job_and_the_log_says_so(
    cluster: Cluster, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    script = "examples/moe_base/train.sbatch"
    overrides = ("--set", f"run.folder={run}", "--set", "run.num_rollouts=100")
    job = submit(cluster, tmp_path, script, ALGORITHM, *tiny, *overrides)
    log = run / "slurm" / f"{job.id}-attempt_0" / "trainer.log"
    wait_for_training(job, log)
    everyone = job.ranks()
    assert len(everyone) == 2
    (rank_1,) = job.ranks(RANK="1")
    killed_at = time.monotonic()
    os.kill(rank_1, signal.SIGKILL)
    said = job.wait_for_state("FAILED", timeout_s=_LIMIT_S)
    assert time.monotonic() - killed_at < 600
    assert not any(map(is_alive, everyone))
    assert "rank 1 on " in said
    assert "ended with status 137" in said
    assert job.exit_codes == ["1:0"], "rank 0's status, not a signal's"
    assert re.search(r"rank 0 failed after this:\nrank 1 \(.*\) died in rollout \d+, step \d+", said)


def wait_for_training(job: Job, log: Path, num_rollouts: int = 1) -> None:
    """Until so many rollouts are trained on."""

    def has_begun() -> bool:
        assert "FAILED" not in job.states, job.output
        return log.exists() and re.search(rf"rollout +{num_rollouts}/", log.read_text()) is not None

    job.cluster.wait_until(has_begun, _LIMIT_S, f"job {job.id} trains; output:\n{job.output}")
