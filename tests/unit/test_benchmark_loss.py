"""tools/benchmarks/loss.py runs, compares what it times with the exact loss, and checks goals on a GPU only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.benchmarks.loss import FLOOR, GOALS, goal_results, prepare
from tools.benchmarks.loss_cases import Case, Shape
from tools.benchmarks.loss_contenders import (
    GRADIENT_LIMIT,
    LOSS_LIMIT,
    Contender,
    UnavailableError,
    check,
    contenders,
    from_library,
)

TOOL = (sys.executable, "-m", "tools.benchmarks.loss")
ROOT = Path(__file__).parents[2]
SMALL = Shape("tp1", tp=1, num_tokens=48, num_columns=128, hidden_size=16)


def test_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "loss.json"
    command = [*TOOL, "--out", out, "--quick", "--shape", "tp1", "--shape", "tp4", "--tokens", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert {"machine", "device", "is_gpu", "kernels", "effort", "cases"} <= set(figures)
    kinds = [(case["shape"]["name"], case["dead_share"]) for case in figures["cases"]]
    assert kinds == [("tp1", 0.0), ("tp1", 0.3), ("tp4", 0.0), ("tp4", 0.3)]
    known = {(contender.form, contender.name) for contender in contenders()}
    for case in figures["cases"]:
        assert case["copy_bytes_per_s"] > 0 and case["byte_floor_s"] > 0
        assert {(row["form"], row["name"]) for row in case["rows"]} == known
        measured = [row for row in case["rows"] if not row["fault"]]
        assert all(row["median_s"] > 0 and len(row["seconds"]) == 5 for row in measured)
        assert {row["form"] for row in measured if row["is_ours"]} == {"logits", "linear", "log_probs"}
        assert "Megatron fused CE" in {row["name"] for row in measured}
        for row in measured:
            assert (row["loss_error"] or 0) <= LOSS_LIMIT and (row["gradient_error"] or 0) <= GRADIENT_LIMIT
        if not figures["is_gpu"]:
            assert {goal["outcome"] for goal in case["goals"]} == {"not measured"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("--shape", "tp3"), "expected one of tp1"), (("--tokens", "100"), "expected a multiple of 8")],
)
def test_an_odd_shape_is_refused_in_one_line(flags: tuple[str, ...], words: str) -> None:
    done = subprocess.run([*TOOL, *flags], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def case() -> Case:
    return Case.make(SMALL, 0.25, torch.device("cpu"))


def test_the_exact_gradients_are_those_of_autograd(case: Case) -> None:
    logits = case.pristine[:-1].float().requires_grad_()
    hidden, weight = case.hidden.float(), case.weight.float()
    log_probs = logits.log_softmax(-1).gather(1, case.targets[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(-(case.coefficients * log_probs).sum(), logits)
    assert case.gradient_error((gradient,)) < 1e-5
    assert case.gradient_error((gradient @ weight, gradient.t() @ hidden)) < 1e-5
    assert int((case.advantages != 0).sum()) == case.num_live == 36


def test_a_wrong_loss_or_gradient_is_found(case: Case) -> None:
    contender = Contender("some", "logits", lambda: lambda: None)
    loss = -(case.coefficients * case.log_probs).sum()
    gradient = torch.cat([rows for _, rows in case.logits_gradients()])
    assert check(contender, case, loss, (gradient,))[2] == ""
    assert "value off" in check(contender, case, loss + 5, (gradient,))[2]
    assert "gradient off" in check(contender, case, loss, (gradient * 1.1,))[2]
    assert "gradient off" in check(contender, case, loss, (gradient * torch.nan,))[2]


def test_a_library_that_is_missing_or_fails_is_a_row_with_the_reason(case: Case) -> None:
    with pytest.raises(UnavailableError, match=r"not installed \(pip install no-such\)"):
        from_library("no-such", "no_such.module", "name")
    with pytest.raises(UnavailableError, match="does not import"):
        from_library("megatron-core", "megatron.core", "no_such_name")

    def fails(*_: object) -> None:
        raise ValueError("first line\nsecond")

    row, function = prepare(Contender("some", "logits", lambda: fails), case)
    assert function is None and row["median_s"] is None and row["fault"] == "fails: ValueError: first line"
    with pytest.raises(ValueError, match="first line"):
        prepare(Contender("some", "logits", lambda: fails, is_ours=True), case)


def test_goals_are_checked_by_what_was_measured() -> None:
    ours = ("logits", "ours, dppo_topk_kl")
    seconds = {ours: 4.0, ("logits", FLOOR): 3.5, ("logits", "Megatron fused CE"): 10.0}
    results = goal_results(seconds, {ours: 2_000_000})
    found = {(form, other): result for (form, _, other), result in zip(GOALS, results, strict=True)}
    assert [found["logits", name]["outcome"] for name in (FLOOR, "memory")] == ["met", "met"]
    assert found["logits", "Megatron fused CE"]["outcome"] == "missed"
    assert found["logits", "Megatron fused CE"]["figure"] == pytest.approx(0.4)
    assert found["logits", "Liger GRPO"]["outcome"] == "not measured"
    assert {result["outcome"] for result in goal_results({}, {})} == {"not measured"}


def test_each_goal_is_of_contenders_there_are() -> None:
    known = {(contender.form, contender.name) for contender in contenders()}
    for form, ours, other in GOALS:
        assert (form, ours) in known
        assert other in (FLOOR, "memory") or (form, other) in known
