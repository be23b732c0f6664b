"""Runs that are killed at random moments, again and again: they end as the run that nobody killed.

Moments that somebody chose are in the campaign; here the clock chooses, from the first import to the last save.
"""

import random
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from tests.faults.asynchronous_runs import AsynchronousRun, stand_ins
from tests.faults.campaign import compare_rows, equal_states
from tests.faults.starting import start_ranks
from tests.faults.test_asynchronous import require_end
from tests.support.lookup_run import lookup_settings, make_lookup_task
from tests.support.processes import wait_until
from tests.support.sanity_run import make_task, settings

NUM_ROLLOUTS, LIMIT_S = 6, 600.0
SAVES = {"every": 1, "reserve_gib": 0.0}


def tables_of(kind: str, task: Path, name: str) -> dict[str, Any]:
    if kind == "agents":
        tables = lookup_settings(task, name, NUM_ROLLOUTS, transformers={"weights": "float32"})
        return tables | {"checkpoint": SAVES}
    return settings(
        task, name, run={"num_rollouts": NUM_ROLLOUTS, "folder": str(task / name)}, checkpoint=SAVES
    )


def lives(config: Path, log: Path, seconds: float | None) -> float:
    """Train in a process that is killed after so long, or never; how long it took. No child of it is left."""
    began = time.monotonic()
    (process,) = start_ranks(1, config, (), log)
    try:
        end = began + (LIMIT_S if seconds is None else seconds)
        children = dict[int, psutil.Process]()
        while process.is_alive() and time.monotonic() < end:
            process.join(0.02)
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                children |= {each.pid: each for each in psutil.Process(process.pid).children(recursive=True)}
    finally:
        process.kill()
        process.join()
    assert process.exitcode in ((0,) if seconds is None else (0, -9)), log.read_text()[-5000:]
    wait_until(lambda: not any(map(is_there, children.values())), LIMIT_S)
    return time.monotonic() - began


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("agents", 3),
        pytest.param("agents", 20, marks=pytest.mark.slow),
        pytest.param("synchronous", 20, marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_as_if_nobody_had_killed_it(kind: str, num_kills: int, tmp_path: Path) -> None:
    task = make_lookup_task(tmp_path) if kind == "agents" else make_task(tmp_path)
    configs = {name: tmp_path / f"{name}.toml" for name in ("whole", "killed")}
    for name, config in configs.items():
        config.write_text(tomli_w.dumps(tables_of(kind, task, name)))
    log, clock = tmp_path / "log.txt", random.Random(num_kills)
    whole_s = lives(configs["whole"], log, None)
    for _ in range(num_kills):
        lives(configs["killed"], log, clock.uniform(0, whole_s))
    lives(configs["killed"], log, None)
    whole, killed = task / "whole", task / "killed"
    assert compare_rows(whole, killed) == (0, 0)
    assert equal_states(whole, killed)
    samples = {file.name: file.read_bytes() for file in (whole / "samples").iterdir()}
    assert samples == {file.name: file.read_bytes() for file in (killed / "samples").iterdir()}
    checkpoints = [sorted(each.name for each in (run / "checkpoints").iterdir()) for run in (whole, killed)]
    assert checkpoints[0] == checkpoints[1]


@pytest.mark.slow
def test_a_run_that_samples_ahead_trains_on_each_place_once(tmp_path: Path) -> None:
    """Its responses depend on when they came: what is compared is the ledger of places."""
    clock = random.Random(2)
    with ExitStack() as stack:
        run = AsynchronousRun(tmp_path, stand_ins(2, stack, token_s=0.1), run={"num_rollouts": NUM_ROLLOUTS})
        for _ in range(20):
            job = run.start(1)
            job.kill_after(clock.uniform(0, 25))
            assert set(job.wait()) <= {0, -9}, job.log[-5000:]
            run.require_no_orphans()
            run.require_ledger()
        require_end(run, run.start(1), NUM_ROLLOUTS)
