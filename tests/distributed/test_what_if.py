"""`what-if`: kept mini-batches, asked again, give what the run measured, and others their own masks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from sanity_run import make_task, settings

ROOT = Path(__file__).parents[2]


def command(*arguments: Any, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """`megatron-dppo ...`, in one process or more."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    start = [sys.executable, *(launch if processes > 1 else []), "-m", "megatron_dppo"]
    return subprocess.run(
        [*start, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes with one gradient step for each rollout, which keeps its mini-batches."""
    task = make_task(tmp_path_factory.mktemp("what_if"))
    tables = settings(
        task,
        "run",
        run={"num_rollouts": 2},
        parallel={"expert": 2},
        data={"reward": "tests.faults.rewards:digits"},
        rollout={"routing_replay": "replay", "num_topk_log_probs": 8},
        algorithm={"preset": "dppo_topk_tv", "top_k": 8, "delta": 0.001, "minibatches_per_rollout": 1},
        optimizer={"warmup_steps": 0, "lr": 1e-3},
        checkpoint={"every": 1},
        tracking={"batches_every": 1},
    )
    (task / "run.toml").write_text(tomli_w.dumps(tables))
    done = command("train", task / "run.toml", processes=2)
    assert done.returncode == 0, done.stderr
    return task / "run"


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """The run's own rows."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_the_weights_that_sampled_give_what_the_run_measured(run: Path, tmp_path: Path) -> None:
    before = run / "checkpoints" / "step_00000001"
    asked = ["what-if", run, "--checkpoint", before, "--rollout", 1, "--sweep", "delta=0.001,0.05,10.0"]
    asked += ["--sweep", "top_k=2", "-o", tmp_path / "alone"]
    done = command(*asked)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "alone" / "what_if.json").read_text())
    measured, step = rows_of(run, "rollout")[1], rows_of(run, "step")[1]
    for name, value in found["mismatch"]["replayed"].items():
        assert value == pytest.approx(measured[f"mismatch/{name}"], rel=1e-4), name
    own = next(row for row in found["rows"] if row["routes"] == "replayed")
    for sign in ("positive", "negative"):
        expected = step[f"trust_region/masked_fraction_{sign}"]
        assert own[f"masked_fraction_{sign}"] == pytest.approx(expected, abs=1e-9)
    assert own["masked_fraction"] > 0 and own["agreement"] == 1.0
    loosest = [row for row in found["rows"] if row.get("delta") == 10.0]
    assert len(loosest) == 2 and all(row["masked_fraction"] == 0.0 for row in loosest)
    page = (tmp_path / "alone" / "what_if.html").read_text()
    assert "dppo_topk_tv delta=0.05 top_k=2" in page and "plotly" in page
    assert "dppo_topk_tv" in done.stdout and "live routes" in done.stdout

    asked[-1] = tmp_path / "two"
    done = command(*asked, processes=2)
    assert done.returncode == 0, done.stderr
    two = json.loads((tmp_path / "two" / "what_if.json").read_text())
    assert two["num_tokens"] == found["num_tokens"]
    assert [row["masked_fraction"] for row in two["rows"]] == [row["masked_fraction"] for row in found["rows"]]


def test_an_anchor_of_the_trainer_needs_its_weights(run: Path, tmp_path: Path) -> None:
    asked = ["what-if", run, "--rollout", 1, "--preset", "dppo_binary_kl_decoupled", "--preset", "grpo"]
    asked += ["-o", tmp_path]
    done = command(*asked)
    assert done.returncode == 2
    assert "Give the checkpoint that the rollout was sampled with as --before" in done.stderr.replace("\n", " ")
    done = command(*asked, "--before", run / "checkpoints" / "step_00000001")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "what_if.json").read_text())
    assert {"dppo_binary_kl_decoupled", "grpo"} < {row["variant"] for row in found["rows"]}
    sampled = rows_of(run, "rollout")[1]["mismatch/abs_prob_diff_mean"]  # by the weights of --before
    assert found["mismatch"]["replayed"]["abs_prob_diff_mean"] > 2 * sampled, "the latest weights are evaluated"
