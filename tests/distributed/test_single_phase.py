"""`train --rollout-only` and `--train-only`: together they are the whole loop."""

import subprocess
from pathlib import Path
from typing import Any

import tomli_w

from tests.support.commands import python
from tests.support.records import metrics_of
from tests.support.sanity_run import settings, without_clocks

ROOT = Path(__file__).parents[2]


def train(task: Path, name: str, *flags: Any, num_rollouts: int = 1) -> subprocess.CompletedProcess[str]:
    """One run of the command, with a reward that varies."""
    tables = settings(
        task,
        name,
        run={"num_rollouts": num_rollouts},
        data={"reward": "tests.faults.rewards:digits"},
        optimizer={"warmup_steps": 0},
        tracking={"clipped_tokens_every": 1},
    )
    file = task / f"{name}.toml"
    file.write_text(tomli_w.dumps(tables))
    return python("-m", "megatron_dppo", "train", file, *flags, cwd=ROOT)


def steps_of(task: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a run's gradient steps, without what a clock measured."""
    return without_clocks(metrics_of(task / name, "step"))


def test_rollout_only_then_train_only_equals_the_complete_run(task: Path) -> None:
    for name, flags in (
        ("whole", ()),
        ("first", ("--rollout-only", task / "kept")),
        ("second", ("--train-only", task / "kept")),
    ):
        done = train(task, name, *flags)
        assert done.returncode == 0, done.stderr
    assert not (task / "first" / "checkpoints" / "latest").exists()
    assert steps_of(task, "first") == []
    whole = steps_of(task, "whole")  # the second one's gradient is of what the first one made of the weights
    assert len(whole) == 2 and all(row["optimizer/grad_norm"] > 0 for row in whole)
    assert steps_of(task, "second") == whole
    lists = [
        [file.read_text() for file in sorted(task.glob(f"{run}/*_tokens/*"))] for run in ("whole", "second")
    ]
    assert lists[0] == lists[1] and len(lists[0]) == 3  # of the rollout, and of each step

    more = train(task, "more", "--train-only", task / "kept", num_rollouts=2)
    assert more.returncode == 2
    assert "expected 2 rollouts. Keep them with --rollout-only" in more.stderr.replace("\n", " ")
    for flag, *settings_ in (
        ("--rollout-only", "rollout.max_staleness=1", "rollout.engine=sglang"),
        ("--rollout-only", "rollout.lag=1", "run.num_rollouts=2"),
        ("--train-only", "tracking.alarms=roll_back"),
    ):
        changes = [word for setting in settings_ for word in ("--set", setting)]
        refused = train(task, "refused", flag, task / "kept", *changes)
        assert refused.returncode == 2 and not (task / "refused").exists()
        key, _, value = settings_[0].partition("=")
        assert f"{key}: found {value}; expected" in refused.stderr.replace("\n", " ")
    both = train(task, "both", "--train-only", task / "kept", "--rollout-only", task / "kept")
    assert both.returncode == 2
    assert "--rollout-only: found --train-only too" in both.stderr
