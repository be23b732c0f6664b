"""How a job deals with a controller that is away, failures, and several nodes; commands are stand-ins."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

_STAND_INS = {
    # The controller is away for the first AWAY calls; then it prints REFUSAL, if set.
    "scontrol": """
case "$1 $2" in
    "show node") echo "NodeName=$4 Arch=x NodeAddr=$4-address NodeHostName=$4 Port=1" ; exit ;;
    "show job") echo "JobId=7 ExcNodeList=${EXCLUDED:-(null)} NodeList=n1" ; exit ;;
    "show hostnames") printf 'n0\\nn1\\nn2\\n' ; exit ;;
esac
echo "$@" >>"$CALLS"
if [ "$(wc -l <"$CALLS")" -le "${AWAY:-0}" ]; then echo "Unexpected message received"; exit 1; fi
if [ -n "$REFUSAL" ]; then echo "$REFUSAL"; exit 1; fi
""",
    "squeue": """
echo "$@" >>"$CALLS"
[ "$(wc -l <"$CALLS")" -gt "${AWAY:-0}" ] || exit 1
echo 1-00:00:00
""",
    "sinfo": "printf 'n0\\nn1\\nn0\\nn2\\n'",
    "sleep": 'echo "sleep $1" >>"$CALLS.slept"',
    "scancel": "exit 1",
    "getent": 'case $2 in n1-address) echo "127.0.1.1 STREAM n1"; echo "10.0.0.2 STREAM" ;; *) exit 2 ;; esac',
    "ip": '[ "$4" != 10.0.0.2 ] || echo "10.0.0.2 dev ib0 src 10.0.0.1 uid 0 cache"',
}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """The file that the stand-in programs write their calls to, in their folder."""
    for name, text in _STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "calls").touch()
    return tmp_path / "calls"


def in_a_job(calls: Path, words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run words of a job's script, after it has read its functions."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CONTAINER"))
    }
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "main", "CALLS": str(calls)}
    path = {"PATH": f"{calls.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . examples/slurm/arguments.sh; {words}"],
        env=inherited | job | path | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, "7"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "9"}, "7_9"),
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}, "5_0"),
    ],
)
def test_requeue_is_retried_until_it_succeeds_and_logged_afterwards(
    calls: Path, variables: dict[str, str], own: str
) -> None:
    """Only the array's own element is requeued: the last element's job id would requeue all of the array."""
    ended = in_a_job(calls, "requeue 'stopped and saved'", AWAY="3", **variables)
    assert calls.read_text().splitlines() == [f"requeue {own}"] * 4
    said = ended.stdout.splitlines()
    away = "attempt 0: stopped and saved, and scontrol requeue says: Unexpected message received; again in 10 s"
    assert said == [away] * 3 + [
        "attempt 0: stopped and saved; the job goes back to the queue, and on from the last checkpoint"
    ]
    assert ended.returncode == 143, "it waited for its end"


def test_a_cluster_that_forbids_requeueing_ends_the_job_with_75(calls: Path) -> None:
    ended = in_a_job(calls, "requeue 'stopped and saved'", REFUSAL="Requested operation is presently disabled")
    assert ended.returncode == 75
    assert "goes back" not in ended.stdout and "Submit the job again" in ended.stderr


@pytest.mark.parametrize(
    ("newest", "is_back"),
    [
        (["", "step_00000004", "step_00000004", "step_00000006"], [True, True, True]),
        (["", "", "step_00000001"], [True, True]),
        (["", "", ""], [True, False]),
        (["step_00000002", "step_00000002", "step_00000002"], [True, False]),
        (["", "step_00000003", "step_00000003", "step_00000003"], [True, True, False]),
    ],
)
@pytest.mark.parametrize("reason", ["stopped and saved", "asked to stop before training began"])
def test_a_job_goes_back_to_the_queue_unless_two_attempts_in_a_row_saved_no_new_step(
    calls: Path, newest: list[str], is_back: list[bool], reason: str
) -> None:
    """The newest checkpoint before the first attempt, then after each."""
    run = calls.parent / "a run"
    (run / "checkpoints").mkdir(parents=True)

    def attempt(number: int, after: str) -> subprocess.CompletedProcess[str]:
        save = f'printf %s "{after}" >"{run}/checkpoints/latest"'
        words = f'begin_attempt "{run}"; {save}; come_back "{reason}"'
        return in_a_job(calls, words, SLURM_RESTART_COUNT=str(number), SLURM_ARRAY_TASK_ID="4")

    if newest[0]:
        (run / "checkpoints/latest").write_text(newest[0])
    for number, (after, goes_back) in enumerate(zip(newest[1:], is_back, strict=True)):
        ended = attempt(number, after)
        assert ended.returncode == (143 if goes_back else 1), ended.stderr
        assert ("the job goes back to the queue" in ended.stdout) == goes_back
        assert ("found two attempts in a row without a new training step" in ended.stderr) != goes_back
    assert calls.read_text().splitlines() == ["requeue 7_4"] * sum(is_back)


def test_a_save_that_takes_too_long_twice_ends_the_job(calls: Path) -> None:
    """The timer cannot end the job; the trainer's step is killed, and what waits for it sees why."""
    run = calls.parent / "run"
    (run / "slurm/7-attempt_0").mkdir(parents=True)
    (run / "slurm/7-attempt_0/began_at").touch()
    words = f'begin_attempt "{run}"; trap on_stop USR1; bash -c "trap : USR1; /bin/sleep 60" & trainer=$!; '
    words += "/bin/sleep 0.5; kill -USR1 $$; status=0; outlast $trainer || status=$?; "
    words += 'echo "$status $(ls "$logs")"'
    ended = in_a_job(calls, words, SLURM_RESTART_COUNT="1", SAVE_SECONDS="9")
    assert ended.stdout == "137 began_at\nstalled\n"
    assert "asked to stop, and not saved in 9 s. found two attempts" in ended.stderr
    assert not calls.read_text()


def test_squeue_is_retried_until_the_controller_replies(calls: Path) -> None:
    ended = in_a_job(calls, 'limit=$(time_limit); echo "limit $limit"', AWAY="4", SLURM_ARRAY_TASK_ID="3")
    assert ended.stdout == "limit 1-00:00:00\n"
    assert calls.read_text().splitlines() == ["--noheader --job 7_3 --format=%l"] * 5
    ended = in_a_job(calls, 'limit=$(time_limit); echo "limit $limit"', AWAY="1000")
    assert ended.returncode == 1 and ended.stdout == ""
    assert "no answer to 'squeue --noheader --job 7 --format=%l' for minutes" in ended.stderr


def test_servers_that_were_not_reached_are_killed_after_a_minute(calls: Path) -> None:
    """The stand-in for sleep returns at once."""
    deaf = "bash -c 'trap : TERM; while :; do /bin/sleep 0.1; done' & end_engine $! 7.1; echo ended"
    ended = in_a_job(calls, deaf)
    assert ended.stdout == "ended\n"
    assert "scancel did not reach the servers" in ended.stderr and "their step is killed" in ended.stderr
    assert Path(f"{calls}.slept").read_text().count("sleep 0.2") == 300


def test_a_step_outlasts_signals_and_a_signal_outlasts_the_step(calls: Path) -> None:
    """The stop signal may interrupt the waiting, or come when the trainer has just ended."""
    wait = "bash -c 'trap : USR1; /bin/sleep 1; /bin/sleep 0.5; exit 7' & trainer=$!; trap on_stop USR1; "
    wait += "status=0; (/bin/sleep 0.5; kill -USR1 $$) & outlast $trainer || status=$?; "
    wait += "end_timer; on_stop; echo $status"
    ended = in_a_job(calls, wait, SAVE_SECONDS="9", REFUSAL="denied")
    assert ended.stdout == "7\n" and ended.returncode == 0
    assert Path(f"{calls}.slept").read_text() == "sleep 9\n", "the time for saving began once"


@pytest.mark.parametrize(
    ("of_ranks", "of_step", "expected"),
    [
        ([2, 2], 143, 2),
        ([137, 1], 143, 1),
        ([143, 2, 1], 143, 2),
        ([1, 2], 1, 1),
        ([137], 143, 1),
        ([], 143, 1),
        ([], 1, 1),
        ([0, 0], 0, 0),
    ],
)
def test_a_job_ends_with_the_status_of_the_first_rank_that_no_signal_ended(
    calls: Path, tmp_path: Path, of_ranks: list[int], of_step: int, expected: int
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nexit "$ENDS_WITH"\n')
    python.chmod(0o755)
    for rank, status in enumerate(of_ranks):
        variables = {"PYTHON": str(python), "ENDS_WITH": str(status), "RANK": str(rank), "LOGS": str(tmp_path)}
        variables |= {"SLURMD_NODENAME": f"n{rank}"}
        ended = subprocess.run(
            ["bash", "examples/slurm/rank.sh"], cwd=ROOT, env=os.environ | variables, check=False
        )
        assert ended.returncode == status
    assert in_a_job(calls, f"own_status {of_step} {tmp_path}").stdout == f"{expected}\n"
    (tmp_path / "trainer.log").touch()
    first = "n0" if any(of_ranks) else ""
    assert in_a_job(calls, f"node_at_fault {tmp_path}").stdout == f"{first}\n"


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("rank 1 (host n1, pid 35) died in rollout 13, step 25, phase train", "n1"),
        ("E 12:00 rank 5 (host n2.cluster.org, pid 7) failed in start-up:", "n2"),
        ("rank 3 (host n1, pid 35) cannot be reached in rollout 1", "n1"),
        ("rank 0 (host n1, pid 1) waited 60 s for other ranks", "n0"),
    ],
)
def test_the_node_at_fault_is_the_one_that_failure_detection_names(calls: Path, line: str, node: str) -> None:
    """Otherwise the first that failed, which wrote its name."""
    (calls.parent / "trainer.log").write_text(f"rank 0 failed after this:\n{line}\nrank 4 failed\n")
    (calls.parent / "failed_on").write_text("n0\n")
    assert in_a_job(calls, f"node_at_fault {calls.parent}").stdout == f"{node}\n"


@pytest.mark.parametrize(
    ("status", "retries", "tried", "is_retried"),
    [
        (1, "0", [], False),
        (1, "2", [], True),
        (1, "2", [0], True),
        (1, "2", [0, 3], False),
        (2, "2", [], False),
    ],
)
def test_a_failure_is_tried_again_as_often_as_the_user_wants(
    calls: Path, status: int, retries: str, tried: list[int], is_retried: bool
) -> None:
    """Attempts that ended by a preemption do not count; the node at fault is excluded in addition to others."""
    logs = calls.parent / "it's" / "7-attempt_"
    for attempt in range(5):
        Path(f"{logs}{attempt}").mkdir(parents=True)
    for attempt in tried:
        Path(f"{logs}{attempt}/retried").touch()
    Path(f"{logs}4/trainer.log").write_text("rank 1 (host n1, pid 35) died in rollout 13")
    variables = {"RETRIES": retries, "SLURM_RESTART_COUNT": "4", "EXCLUDED": "n8", "SLURM_ARRAY_TASK_ID": "6"}
    ended = in_a_job(calls, f'retry {status} "{logs}"; exit {status}', **variables)
    if is_retried:
        assert calls.read_text().splitlines() == ["requeue 7_6", "update JobId=7_6 ExcNodeList=n8,n1"]
        assert (
            f"failed with status 1, try {len(tried) + 1} of 2; the job goes back to the queue" in ended.stdout
        )
        assert "node n1 is left out from now on" in ended.stdout
    else:
        assert ended.returncode == status and not calls.read_text()
    needs_all = in_a_job(calls, f'retry 1 "{logs}"', **variables | {"SLURM_JOB_NUM_NODES": "3", "RETRIES": "9"})
    assert "left out" not in needs_all.stdout


def test_nodes_meet_at_an_address_of_the_network_between_them(calls: Path) -> None:
    """A node's name may map to loopback on that node; the route to another node shows an address that works."""
    meet = 'meet_at n0 n1 n2; echo "$MASTER_ADDR $SECOND_ADDR"'
    assert in_a_job(calls, meet).stdout == "10.0.0.1 10.0.0.2\n"
    assert in_a_job(calls, 'meet_at n0; echo "$MASTER_ADDR $SECOND_ADDR"').stdout == "127.0.0.1 \n"


@pytest.mark.parametrize(
    ("node", "given", "interface"),
    [("0", {}, "ib0"), ("1", {}, ""), ("0", {"GLOO_SOCKET_IFNAME": "eth7"}, "eth7")],
)
def test_gloo_takes_the_interface_of_the_route_to_the_other_nodes(
    calls: Path, node: str, given: dict[str, str], interface: str
) -> None:
    """The stand-in for `ip` knows the route to the second node, and not the one back."""
    (calls.parent / "python").write_text('#!/bin/bash\necho "interface ${GLOO_SOCKET_IFNAME:-}: $*"\n')
    (calls.parent / "python").chmod(0o755)
    step = {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": node,
        "LOGS": str(calls.parent),
        "PROCESSES_PER_NODE": "8",
    }
    step |= {"MASTER_ADDR": "10.0.0.1", "SECOND_ADDR": "10.0.0.2", "MASTER_PORT": "15000"}
    step |= {"PYTHON": str(calls.parent / "python")}
    said = in_a_job(
        calls, "PYTHON=$OURS exec bash examples/slurm/node.sh", OURS=step["PYTHON"], **step | given
    ).stdout
    assert said.startswith(f"interface {interface}: -m torch.distributed.run --nnodes=2 --node-rank={node}")
