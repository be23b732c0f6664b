"""Runs that sample ahead: their trainer is killed at every moment, and their ranks fail, each in its way."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.asynchronous_runs import STALENESS, AsynchronousRun, Job, stand_ins
from tests.faults.cases import at

NUM_ROLLOUTS = 4
LOAD, REFUSAL = "/update_weights_from_disk", (500, {"success": False, "message": "as the test wants it"})
SHORT = {"weight_sync": "disk", "probe_every": 0, "sync_timeout_s": 20.0}
MARKED = ("place3+0", "place11+1")  # whose reward hangs


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def require_end(run: AsynchronousRun, job: Job, num_rollouts: int = NUM_ROLLOUTS) -> None:
    """The run is over; each rollout has one row, and no token was too old."""
    assert set(job.wait()) == {0}, job.log[-6000:]
    run.require_no_orphans()
    rows = run.rows("rollout")
    assert [row["rollout"] for row in rows] == list(range(num_rollouts))
    assert all(row["rollout/staleness_max"] <= STALENESS for row in rows)
    assert run.require_ledger() == 4 * num_rollouts


def test_a_trainer_killed_at_every_moment_trains_on_each_place_once(tmp_path: Path, stack: ExitStack) -> None:
    """Again and again the same run: no request stays at a server, none is lost, none is trained on twice."""
    rewarded = {"reward": "tests.faults.rewards:hangs_if_marked", "reward_timeout_s": 4.0}
    run = AsynchronousRun(
        tmp_path,
        stand_ins(2, stack, token_s=0.1, is_marked=lambda rid: rid.partition("#")[0] in MARKED),
        run={"num_rollouts": NUM_ROLLOUTS},
        data=rewarded,
        rollout={"max_dropped_fraction": 0.9},
    )
    for moment, number in (
        ("wait", 2),  # while the trainer waits for its first rollout
        ("abort", 1),  # in the middle of a hold, with requests at the servers
        ("updated", 2),  # servers are paused, and hold weights that no checkpoint has
        ("go on", 3),  # between push and sampling
        ("gradient", 3),  # in training, while responses are sampled
        ("publish", 1),  # while a checkpoint is written
    ):
        job = run.start(1, at("SIGKILL", moment, number))
        assert job.wait() == [-9], (moment, job.log[-6000:])
        run.require_no_orphans()
        run.require_ledger()
    require_end(run, run.start(1))
    assert sum(len(server.unfinished) for server in run.servers) > 0  # requests of killed trainers
    assert sum(row["rollout/dropped_reward_timed_out"] for row in run.rows("rollout")) >= 1


def test_a_fault_of_one_of_two_ranks_ends_both_and_loses_nothing(tmp_path: Path, stack: ExitStack) -> None:
    num_rollouts = (
        NUM_ROLLOUTS + 3
    )  # enough for six groups of each rank in the second start, and a save in the third
    run = AsynchronousRun(
        tmp_path,
        stand_ins(1, stack),
        run={"num_rollouts": num_rollouts},
        parallel={"expert": 2},
    )
    job = run.start(2, at("SIGTERM", "wait", 2, rank=1))
    assert job.wait() == [75, 75], job.log[-6000:]
    assert "asked to stop: saved after" in job.log
    run.require_no_orphans()
    run.require_ledger()

    slow = at("slow", "step", 1, 2, rank=1)
    job = run.start(2, slow, at("raise", "group", 6, rank=1))
    assert set(job.wait()) <= {1, 2}, job.log[-6000:]
    assert "ValueError: injected" in "\n".join(job.log.splitlines()[-20:])
    run.require_no_orphans()
    run.require_ledger()

    job = run.start(2, at("hang", "hold", 3, rank=1), timeout_s=20.0)
    assert job.wait() == [1, 1], job.log[-6000:]
    assert "did not come: it is in" in job.log and "phase sync" in job.log, job.log[-6000:]
    run.require_no_orphans()
    num_trained = run.require_ledger()
    assert num_trained >= 4

    # It comes late to its steps, and keeps the other waiting in two holds, whose requests have ended.
    slow = at("slow", "step", 1, 2, 3, rank=1), at("slow", "hold", 1, 2, rank=1)
    require_end(run, run.start(2, *slow), num_rollouts)


def test_servers_that_fail_while_they_load_weights_cost_no_place(tmp_path: Path, stack: ExitStack) -> None:
    """One refuses, one dies and one hangs; open responses resume at the servers that have the weights."""
    servers = stand_ins(4, stack)

    def refuses(path: str, number: int) -> tuple[int, Any] | None:
        return REFUSAL if path == LOAD and number in (2, 3) else None  # both times in the second push

    def dies(path: str, number: int) -> None:
        if path == LOAD and number == 3:
            servers[1].stop()

    def hangs(path: str, number: int) -> None:
        if path == LOAD and number == 4:
            servers[2].hang()

    servers[0].before, servers[1].before, servers[2].before = refuses, dies, hangs
    run = AsynchronousRun(tmp_path, servers, run={"num_rollouts": NUM_ROLLOUTS}, rollout={"sglang": SHORT})
    job = run.start(1)
    require_end(run, job)
    assert [row["sync/servers"] for row in run.rows("rollout")] == [3, 3, 2, 2]
    assert job.log.count("gets no requests until a push reaches it") >= 4


def test_a_push_that_no_server_takes_ends_the_run_and_loses_nothing(tmp_path: Path, stack: ExitStack) -> None:
    """The only server hangs, or refuses, while the producer's requests wait for the push."""
    (server,) = servers = stand_ins(1, stack)
    run = AsynchronousRun(tmp_path, servers, run={"num_rollouts": NUM_ROLLOUTS}, rollout={"sglang": SHORT})

    def hangs(path: str, number: int) -> None:
        if path == LOAD and number == 2:
            server.hang()

    for harm in (hangs, lambda path, number: REFUSAL if path == LOAD else None):
        server.before = harm
        job = run.start(1)
        assert job.wait() == [1], job.log[-6000:]
        assert "found no SGLang server that took it" in job.log
        server.wake()
        run.require_no_orphans()
        run.require_ledger()
    server.before = lambda path, number: None
    require_end(run, run.start(1))


def test_evaluation_while_sampling_ahead_has_one_weight_version(tmp_path: Path, stack: ExitStack) -> None:
    """On the same server, where requests of both are at once; each by one version of the weights."""
    versions, is_beside = dict[str, set[int]](), list[bool]()

    def note(rid: str) -> bool:  # called for each token
        if not rid.startswith("place"):
            versions.setdefault(rid.partition("/")[0], set()).add(server.version)
            is_beside.append(any(other.startswith("place") for other in list(server.running_ids)))
        return False

    (server,) = servers = stand_ins(1, stack, is_marked=note)
    held_out = {"held_out": {"prompts": str(tmp_path / "held_out.jsonl")}}
    run = AsynchronousRun(
        tmp_path,
        servers,
        run={"num_rollouts": NUM_ROLLOUTS},
        evaluation={"every": 1, "samples_per_prompt": 2, "sets": held_out},
    )
    require_end(run, run.start(1))
    trained = [place for rollout in range(NUM_ROLLOUTS) for place in run.trained_on(rollout)[0]]
    assert run.begun == set(trained)  # no group begins that no rollout trains on
    assert list(versions.values()) == [{version} for version in range(NUM_ROLLOUTS + 1)]
    assert any(is_beside)
    rows = run.rows("evaluation")
    assert [row["rollout"] for row in rows] == list(range(NUM_ROLLOUTS + 1))
    assert all(row["eval/held_out/dropped"] == 0 for row in rows)


def test_a_roll_back_forgets_what_the_weights_that_are_taken_back_sampled(
    tmp_path: Path, stack: ExitStack
) -> None:
    run = AsynchronousRun(
        tmp_path,
        stand_ins(1, stack),
        run={"num_rollouts": NUM_ROLLOUTS},
        tracking={"batches_every": 1, "samples_every": 1, "alarms": "roll_back"},
    )
    job = run.start(1, at("NaN weight", "step", 5))  # the first of the third rollout
    assert job.wait() == [0], job.log[-6000:]
    run.require_no_orphans()
    rows = run.rows("rollout")
    assert [row["rollout"] for row in rows] == list(range(NUM_ROLLOUTS))
    assert [row.get("alarms/roll_backs") for row in rows] == [None, None, 1, 1]
    trained = [run.trained_on(rollout) for rollout in range(NUM_ROLLOUTS)]
    assert all(max(versions) <= 1 for _, versions in trained[:2])
    assert all(min(versions) >= 4 for _, versions in trained[2:])  # 3 had no number in it, and 4 followed
    places = [place for of_rollout, _ in trained for place in of_rollout]
    assert len(places) == len(set(places)) == 4 * NUM_ROLLOUTS
