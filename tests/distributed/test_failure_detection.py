"""A rank that dies, raises or hangs ends the job; every case is a job of fresh processes with one log."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dppo.failure_detection.report import Rank, Report, first_cause, job_failure
from megatron_dppo.runtime.process import Progress, Runtime
from tests.distributed import watched_jobs as jobs

LONG_S = 2 * jobs.LIMIT_S  # of what must not time out
SOON_S = jobs.LIMIT_S / 2


@dataclass(frozen=True)
class Ended:
    """How a job ended; `after_s` counts from the first fault that a rank noted."""

    codes: list[int]
    log: str
    after_s: float

    @property
    def last_lines(self) -> list[str]:
        return self.log.rstrip().splitlines()


Jobs = Callable[..., Ended]


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported all that ranks need, and forks them."""
    command, pipe = [sys.executable, "-m", jobs.__name__], subprocess.PIPE
    environment, root = os.environ | {"OMP_NUM_THREADS": "1"}, Path(__file__).parents[2]
    with subprocess.Popen(command, env=environment, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_job(starter: subprocess.Popen[str], tmp_path: Path) -> Jobs:
    """Runs a body under the watch on two ranks, or on some of them."""

    def run(
        body: Callable[[Runtime], None],
        ranks: tuple[int, ...] = (0, 1),
        timeout_s: float = LONG_S,
        peer_timeout_s: float = LONG_S,
        patience_s: float = LONG_S,
    ) -> Ended:
        assert starter.stdin is not None and starter.stdout is not None
        job = {"body": body.__name__, "ranks": ranks, "timeout_s": timeout_s, "folder": str(tmp_path)}
        job |= {"peer_timeout_s": peer_timeout_s, "patience_s": patience_s}
        starter.stdin.write(json.dumps(job) + "\n")
        starter.stdin.flush()
        codes, ended = json.loads(starter.stdout.readline())
        log, fault = (tmp_path / "log").read_text(), tmp_path / "fault"
        after_s = ended - fault.stat().st_mtime if fault.exists() else 0.0
        print(f"{body.__name__}: {codes} after {after_s:.1f} s\n{log}")
        return Ended(codes, log, after_s)

    return run


@pytest.mark.parametrize(
    ("body", "rank"),
    [(jobs.rank_0_raises, 0), (jobs.rank_1_raises, 1), (jobs.rank_1_raises_after_losing_rank_0, 1)],
)
def test_exception_ends_the_job(body: Callable[[Runtime], None], rank: int, run_job: Jobs) -> None:
    ended = run_job(body)
    assert ended.codes == [1, 1]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1] == "ValueError: no such thing"
    assert ended.log.count("Traceback") == 1, "no other rank speaks"
    trace = ended.log.index("Traceback")
    title = ended.log[:trace].rstrip().splitlines()[-1]
    assert title.startswith(f"rank {rank} (host {socket.gethostname()}, pid ")
    assert body is jobs.rank_1_raises_after_losing_rank_0 or title.endswith(
        " in rollout 4, step 12, phase train:"
    )
    assert body.__name__ in ended.log[trace:]
    assert "watch/__init__.py" not in ended.log[trace:]


def test_exception_is_not_kept_waiting_by_a_computing_rank(run_job: Jobs) -> None:
    ended = run_job(jobs.rank_1_raises_while_rank_0_computes)
    assert ended.codes == [1, 1]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1] == "ValueError: no such thing"


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        (jobs.user_error_on_rank_1, 2, "TrainingError: the loss is not finite. Lower optimizer.lr."),
        (jobs.server_error_on_rank_1, 1, "ServerError: no server is left"),
    ],
)
def test_an_error_of_the_package_is_a_message_and_its_status(
    body: Callable[[Runtime], None], code: int, last: str, run_job: Jobs
) -> None:
    ended = run_job(body)
    assert ended.codes == [code, code]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1].endswith(last)
    assert ended.last_lines[-2].startswith("rank 1 (host ")
    assert "Traceback" not in ended.log


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        (jobs.same_error_on_all, 2, "ConfigError: run.folder is in use"),
        (jobs.same_error_found_by_each, 2, "ConfigError: parallel.expert does not divide"),
        (jobs.unpicklable_error_on_all, 1, "_Unpicklable: 1 and 2"),
    ],
)
def test_error_of_all_ranks_is_printed_once(
    body: Callable[[Runtime], None], code: int, last: str, run_job: Jobs
) -> None:
    ended = run_job(body)
    assert ended.codes == [code, code]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1].endswith(last)
    assert ended.log.count(last) == 1
    assert "rank 1 failed like this:\nrank 0 (host " in ended.log


@pytest.mark.parametrize(
    "body", [jobs.rank_1_dies_in_collective, jobs.rank_1_dies_while_computing, jobs.rank_1_dies_leaving_a_child]
)
def test_death_of_a_rank_is_noticed_at_once(body: Callable[[Runtime], None], run_job: Jobs) -> None:
    ended = run_job(body)
    assert ended.codes == [1, -signal.SIGKILL]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1].startswith("rank 1 (host ")
    assert " died in phase of rank 1, " in ended.last_lines[-1]


@pytest.mark.parametrize("body", [jobs.rank_0_dies_in_collective, jobs.rank_0_dies_while_computing])
def test_death_of_rank_0_is_noticed_at_once(body: Callable[[Runtime], None], run_job: Jobs) -> None:
    ended = run_job(body)
    assert ended.codes == [-signal.SIGKILL, 1]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1].startswith("rank 0 (host ")
    assert " died while in phase of rank 0 " in ended.last_lines[-1]
    assert "Traceback" not in ended.log


def test_stopped_rank_is_named_and_killed(run_job: Jobs) -> None:
    ended = run_job(jobs.rank_1_is_stopped_in_a_collective)
    assert ended.codes == [1, -signal.SIGKILL]
    assert ended.after_s < SOON_S
    assert "rank 0 (host " in ended.log
    assert " waited 2.0 s for other ranks in rollout 4, step 12, phase train:" in ended.log
    assert ended.last_lines[-1].startswith("rank 1 (host ")
    assert " did not come: it is in rollout 4, step 12, phase train for " in ended.last_lines[-1]
    assert "its process is stopped" in ended.last_lines[-1]


def test_stopped_rank_0_is_killed_by_who_waited_for_it(run_job: Jobs) -> None:
    ended = run_job(jobs.rank_0_is_stopped_in_a_collective, patience_s=2.0)
    assert ended.codes == [-signal.SIGKILL, 1]
    assert ended.after_s < SOON_S
    assert "rank 0 (host " in ended.log
    assert "it was stopped, and is killed now" in ended.log
    assert "Timed out waiting 2000ms" in ended.last_lines[-1]


@pytest.mark.parametrize(
    ("body", "codes", "words"),
    [
        (jobs.rank_1_is_stopped, [1, -signal.SIGKILL], "is silent in rollout 4, step 12, phase train, "),
        (jobs.rank_0_is_stopped, [-signal.SIGKILL, 1], "is silent while in start-up "),
    ],
)
def test_a_stopped_rank_is_missed_before_any_collective_ends(
    body: Callable[[Runtime], None], codes: list[int], words: str, run_job: Jobs
) -> None:
    ended = run_job(body, peer_timeout_s=8.0)
    assert ended.codes == codes
    assert ended.after_s < SOON_S
    assert words in ended.last_lines[-1]
    assert "it is stopped" in ended.last_lines[-1]


@pytest.mark.parametrize(("body", "rank"), [(jobs.rank_0_loops, 0), (jobs.rank_1_loops, 1)])
def test_hung_rank_shows_its_stack(body: Callable[[Runtime], None], rank: int, run_job: Jobs) -> None:
    ended = run_job(body)
    assert ended.codes == [1, 1]
    assert ended.after_s < SOON_S
    assert f"rank {1 - rank} (host " in ended.log
    assert " waited 2.0 s for other ranks in " in ended.log
    tail = ended.log[ended.log.index(f"rank {rank} (host ") :]
    assert " did not come: it is in " in tail.splitlines()[0]
    assert ", in compute" in "\n".join(tail.rstrip().splitlines()[-3:]), "the stack stands last"


@pytest.mark.parametrize(("body", "code"), [(jobs.all_well, 0), (jobs.all_leave_with_75, 75)])
def test_end_without_failure_says_nothing(body: Callable[[Runtime], None], code: int, run_job: Jobs) -> None:
    ended = run_job(body, patience_s=2.0)
    assert ended.codes == [code, code]
    assert ended.log == ""


def test_early_exit_of_one_rank_is_reported_when_the_others_fail(run_job: Jobs) -> None:
    ended = run_job(jobs.rank_1_leaves_alone)
    assert ended.codes == [1, 75]
    assert ended.after_s < SOON_S
    assert "rank 1 had left before, with exit status 75.\nrank 0 (host " in ended.log


def test_failure_after_the_end_of_rank_0_is_reported(run_job: Jobs) -> None:
    ended = run_job(jobs.rank_1_fails_after_rank_0_is_done)
    assert ended.codes == [1, 1]
    assert ended.after_s < SOON_S
    assert ended.last_lines[-1] == "ValueError: no such thing"


@pytest.mark.parametrize(
    ("absent", "found"), [(1, "found 1 of them, without rank 1,"), (0, "nobody listening")]
)
def test_rank_that_never_starts_is_missed(absent: int, found: str, run_job: Jobs) -> None:
    ended = run_job(jobs.all_well, ranks=(1 - absent,), timeout_s=1.0)
    assert ended.codes == [1]
    assert ended.last_lines[-1].startswith(
        "megatron_dppo.errors.LaunchError: expected 2 processes (WORLD_SIZE)"
    )
    assert found in ended.last_lines[-1]
    assert re.search(r"after \d+ s", ended.last_lines[-1])


def test_own_error_or_death_comes_before_secondary_errors() -> None:
    def report(rank: int, kind: str, summary: str = "") -> Report:
        return Report(rank, kind, 1, summary or f"{kind} {rank}", "", "start-up", 0.0)

    lost, late, repeated = report(0, "lost"), report(1, "late"), report(5, "repeated")
    raised, died = report(2, "raised", "ValueError: x"), report(3, "died")
    assert first_cause([lost, late, repeated]) == late
    assert first_cause([lost, repeated, raised, died]) == raised
    assert first_cause([lost, died, raised]) == died
    assert first_cause([report(4, "raised", "ValueError: x"), raised]) == raised, "alike: the lowest rank"


def test_rank_with_a_different_stack_is_listed_last() -> None:
    ranks = {number: Rank(number, "host", number, since=0.0) for number in range(64)}
    for number in range(4, 64):
        ranks[number].stack = "in all_reduce"
    ranks[7].stack = "in a loop"
    late = [
        Report(number, "late", 1, "Timed out waiting 1000ms", f"trace {number}", "x", 1.0) for number in (0, 1)
    ]
    for report in late:
        ranks[report.rank].end = "failed"
    ranks[2].end, ranks[2].how = ranks[3].end, ranks[3].how = "left", "exit status 75"
    lines = job_failure(late, ranks, now=5.0).text.splitlines()
    assert lines == [
        "ranks 2-3 had left before, with exit status 75.",
        "rank 0 (host host, pid 0) waited 1.0 s for other ranks in x:",
        "trace 0",
        "rank 1 waited 1.0 s too, in x",
        "ranks 4-6, 8-63 are at one place: "
        "rank 4 (host host, pid 4) did not come: it is in start-up for 5.0 s; "
        "its main thread:",
        "in all_reduce",
        "rank 7 (host host, pid 7) did not come: it is in start-up for 5.0 s; its main thread:",
        "in a loop",
    ]


def test_progress_in_words() -> None:
    progress = Progress()
    assert progress.describe() == "start-up"
    before = progress.since
    progress.rollout, progress.step, progress.phase = 0, 12, "train"
    assert progress.describe() == "rollout 1, step 12, phase train"
    assert progress.since > before
