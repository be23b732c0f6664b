"""Training on rollouts of an engine that holds its weights as a quantised checkpoint does."""

from pathlib import Path
from typing import Any

import tomli_w

from tests.support.commands import python
from tests.support.records import metrics_of
from tests.support.sanity_run import make_task, settings

ROOT = Path(__file__).parents[2]


def trained(task: Path, weights: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The gradient steps and the rollouts of a run of two, with a reward that varies."""
    tables = settings(
        task,
        weights,
        run={"num_rollouts": 2},
        data={"reward": "tests.faults.rewards:digits"},
        rollout={"transformers": {"weights": weights}},
        optimizer={"warmup_steps": 0},
    )
    toml = task / f"{weights}.toml"
    toml.write_text(tomli_w.dumps(tables))
    done = python("-m", "megatron_dppo", "train", toml, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = metrics_of(task / weights)
    steps, rollouts = ([row for row in rows if row["kind"] == kind] for kind in ("step", "rollout"))
    return steps, rollouts


def test_both_formats_train_and_4_bits_have_a_larger_mismatch_than_8(tmp_path: Path) -> None:
    task, distance = make_task(tmp_path), dict[str, float]()
    for weights in ("modelopt_fp8", "modelopt_nvfp4"):
        steps, rollouts = trained(task, weights)
        assert len(steps) == 4 and all(step["optimizer/grad_norm"] > 0 for step in steps)
        assert len(rollouts) == 2 and all(row["routing/agreement_mean"] < 1 for row in rollouts)
        distance[weights] = rollouts[0]["mismatch/kl_k3"]
    assert distance["modelopt_nvfp4"] > 4 * distance["modelopt_fp8"]
    assert distance["modelopt_fp8"] > 1e-3  # of bfloat16 weights, 2e-4
