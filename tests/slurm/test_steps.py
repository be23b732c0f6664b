"""What jobs start, where, and what becomes of it; stand_in.sh takes the place of servers and trainer."""

import socket
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.jobs import Job, stand_in_environment, submit
from tests.support.locks import hold_in_another_process

TRAIN = "examples/moe_base/train.sbatch"
ALGORITHM = "dppo_binary_tv.toml"
_LIMIT_S = 1200


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
    ids=["on separate nodes", "on the trainer's nodes"],
)
def test_engine_step_runs_during_the_trainers_step(
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


def test_an_array_is_a_run_for_each_seed_and_only_the_stopped_one_is_requeued(
    cluster: Cluster, tiny: tuple[str, ...], run: Path
) -> None:
    """The last element's job id is the array's; --export with a list reaches no step of SLURM's own accord."""
    names = ("MEGATRON_DPPO_VENV", "PROCESSES_PER_NODE", "PYTHONPATH", "SAVE_SECONDS")
    names += tuple(f"STAND_IN_{name}" for name in ("PYTHON", "FOLDER", "SECONDS"))
    options = ("--array=3,8", "--nodes=1", f"--export={','.join(names)}")
    sets = ("parallel.expert=1",)
    job = start(cluster, run, tiny, *options, sets=sets, STAND_IN_SECONDS="1000", SAVE_SECONDS="1")
    logs = {seed: run / f"seed_{seed}" / "slurm" for seed in (3, 8)}

    def attempts(seed: int) -> list[str]:
        return [path.parent.name[-1] for path in sorted(logs[seed].glob("*/trainer.log"))]

    cluster.wait_until(lambda: attempts(3) == attempts(8) == ["0"], _LIMIT_S, f"both train:\n{job.output}")
    cluster.ask(["scancel", "--batch", "--signal=USR1", f"{job.id}_8"])
    cluster.wait_until(lambda: attempts(8) == ["0", "1"], _LIMIT_S, f"one is requeued:\n{job.output}")
    (run / "end").touch()
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert attempts(3) == ["0"]
    for seed in (3, 8):
        command = min(logs[seed].glob("*-attempt_0/trainer.log")).read_text()
        assert f'--set run.seed={seed} --set run.folder="{run}/seed_{seed}"' in command


def test_job_waits_for_a_run_folder_of_an_unresponsive_host(
    cluster: Cluster, tiny: tuple[str, ...], run: Path
) -> None:
    """SLURM has given up that host, and the process there lives on for a while."""
    other = hold_in_another_process(run, "elsewhere")
    try:
        job = start(cluster, run, tiny)
        waits = f"waiting for process {other.pid} on elsewhere"
        cluster.wait_until(lambda: waits in job.output, _LIMIT_S, f"the job waits; output:\n{job.output}")
        assert not (run / "begun").exists()
    finally:
        other.kill()
        other.wait()
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)


@pytest.mark.parametrize(
    ("num_nodes", "status", "state", "exit_code"),
    [("1", "1", "COMPLETED", "0:0"), ("2", "2", "FAILED", "2:0")],
    ids=["a failure", "an error of the user's"],
)
def test_a_failed_job_starts_again_on_another_node_if_the_user_wants_it(
    cluster: Cluster, tiny: tuple[str, ...], run: Path, num_nodes: str, status: str, state: str, exit_code: str
) -> None:
    options = (f"--nodes={num_nodes}",)
    sets = ("parallel.expert=1",)
    job = start(cluster, run, tiny, *options, sets=sets, RETRIES="1", STAND_IN_STATUS=status)
    said = job.wait_for_state(state, timeout_s=_LIMIT_S)
    assert job.exit_codes == [exit_code]
    first, *more = [path.read_text()[:2] for path in sorted(run.glob("slurm/*/trainer.log"))]
    assert f"rank 0 on {socket.gethostname()} ended with status {status}" in said
    assert more == ([] if state == "FAILED" else [{"n0": "n1", "n1": "n0"}[first]])


def test_a_config_with_problems_starts_no_rank(cluster: Cluster, tiny: tuple[str, ...], run: Path) -> None:
    job = start(cluster, run, tiny, sets=("rollout.top_p=0.9", "parallel.tensor=3"))
    said = job.wait_for_state("FAILED", timeout_s=_LIMIT_S)
    assert "ConfigError: " in said
    assert "rollout.top_p: found 0.9" in said
    assert "parallel.tensor" in said
    assert job.exit_codes == ["2:0"]
    assert not (run / "begun").exists()


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, tiny: tuple[str, ...], run: Path) -> None:
    job = start(cluster, run, tiny, STAND_IN_SECONDS="1000")
    cluster.wait_until((run / "begun").exists, _LIMIT_S, f"the trainer starts; output:\n{job.output}")
    cluster.ask(["scancel", job.id])
    job.wait_for_state("CANCELLED", timeout_s=_LIMIT_S)
    assert "goes back to the queue" not in job.output


def test_a_preempted_job_that_saves_too_slowly_makes_room_and_comes_back(
    cluster: Cluster, tiny: tuple[str, ...], run: Path
) -> None:
    job = start(cluster, run, tiny, STAND_IN_SECONDS="1000", SAVE_SECONDS="1")
    cluster.wait_until((run / "begun").exists, _LIMIT_S, f"the trainer starts; output:\n{job.output}")
    urgent = submit(cluster, run.parent, "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=date")
    urgent.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    assert "attempt 0: asked to stop, and not saved in 1 s; the job goes back to the queue" in said
    assert "attempt 1: 2 x 1 processes" in said


@pytest.mark.parametrize(("requeues", "state"), [(False, "FAILED"), (True, "CANCELLED")])
def test_a_job_saves_and_stays_stopped(
    cluster: Cluster, tiny: tuple[str, ...], run: Path, requeues: bool, state: str
) -> None:
    """As the page on stopping has it: without requeueing, or cancelled once it is in the queue again."""
    job = start(cluster, run, tiny, STAND_IN_SECONDS="1000", STAND_IN_ATTEMPTS="9")
    logs = run / "slurm" / f"{job.id}-attempt_0"
    cluster.wait_until((logs / "trainer.log").exists, _LIMIT_S, f"it trains; output:\n{job.output}")
    if not requeues:
        cluster.ask(["scontrol", "update", f"JobId={job.id}", "Requeue=0"])
    cluster.ask(["scancel", "--signal=USR1", "--batch", job.id])
    for file in (logs / "stopped", run / "end"):  # the stand-in saves
        file.touch()
    if requeues:
        cluster.wait_until(lambda: job.states == ["PENDING"], _LIMIT_S, f"it is requeued:\n{job.output}")
        cluster.ask(["scancel", job.id])
    said = job.wait_for_state(state, timeout_s=_LIMIT_S)
    assert ("Submit the job again" in said) != requeues
    assert job.exit_codes == ["0:0" if requeues else "75:0"]
    assert [path.name for path in (run / "slurm").iterdir()] == [logs.name]


def test_a_job_that_stops_twice_without_a_step_fails(
    cluster: Cluster, tiny: tuple[str, ...], run: Path
) -> None:
    job = start(cluster, run, tiny, SAVE_SECONDS="1", STAND_IN_SECONDS="1000", STAND_IN_ATTEMPTS="9")
    for attempt in range(2):
        log = run / "slurm" / f"{job.id}-attempt_{attempt}" / "trainer.log"
        cluster.wait_until(log.exists, _LIMIT_S, f"attempt {attempt} trains; output:\n{job.output}")
        cluster.ask(["scancel", "--batch", "--signal=USR1", job.id])
    said = job.wait_for_state("FAILED", timeout_s=_LIMIT_S)
    assert job.exit_codes == ["1:0"]
    assert said.count("the job goes back to the queue") == 1
    assert "attempt 1: asked to stop, and not saved in 1 s. found two attempts in a row" in said


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--time=19",), "found a time limit of 19:00, and SAVE_SECONDS=480; expected 20 minutes or more"),
        (("--nodes=1", ":", "--nodes=1"), "found a heterogeneous job of 2 components"),
    ],
)
def test_a_job_that_could_not_train_ends_before_a_step_starts(
    cluster: Cluster, tiny: tuple[str, ...], run: Path, options: tuple[str, ...], found: str
) -> None:
    said = start(cluster, run, tiny, *options).wait_for_state("FAILED", "CANCELLED", timeout_s=_LIMIT_S)
    assert found in said
    assert not run.exists()


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (("--gpus-per-node=h100:8",), {}),
        (("--gres=gpu:h100:8", "--gpus-per-node=h100:8"), {}),
        ((), {"SBATCH_GPUS_PER_NODE": "h100:8"}),
    ],
)
def test_gpus_may_be_requested_by_their_type(
    cluster: Cluster, tiny: tuple[str, ...], run: Path, options: tuple[str, ...], variables: dict[str, str]
) -> None:
    job = start(cluster, run, tiny, "--nodes=1", *options, sets=("parallel.expert=1",), **variables)
    job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S)
    shown = cluster.ask(["scontrol", "show", "job", "--oneliner", job.id])
    assert "gpu:h100:8" in shown


@pytest.mark.parametrize("options", [("--constraint=ib&fast",), ("--constraint=fast", "--array=3")])
def test_jobs_submitted_by_a_job_keep_constraint_and_partition(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The real scheduler reports the job's options, also for an array's element."""
    words = (
        "bash -euc '. examples/slurm/pair.sh; prepare_to_submit moe_base; env | grep -E ^SBATCH_[CP] | sort'"
    )
    job = submit(cluster, tmp_path, *options, f"--wrap={words}", "--partition=main", SBATCH_PARTITION="")
    said = job.wait_for_state("COMPLETED", timeout_s=_LIMIT_S).split()
    constraint = options[0].partition("=")[2]
    assert said == [f"SBATCH_CONSTRAINT={constraint}", "SBATCH_PARTITION=main"]
