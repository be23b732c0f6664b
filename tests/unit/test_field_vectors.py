"""The field's presets against exact values (mpmath, 60 digits) of tests/vectors/field_vectors.json."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import PolicyLossInputs, PolicyLossOutput, TopKLogProbs, policy_loss, preset
from megatron_dppo.algorithms.presets import FIELD

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "field_vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
RULES = {
    f"{name}: {rule['preset']} {number}": (case, rule)
    for name, case in CASES.items()
    for number, rule in enumerate(case["rules"])
}
OTHERS = {
    f"{other['framework']}: {other['case']}: {other['preset']} {number}": other
    for number, other in enumerate(VECTORS["others"])
}
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def test_every_preset_has_cases_and_a_source():
    names = {objective.name for objective in FIELD}
    assert names == set(VECTORS["sources"]) == {rule["preset"] for _, rule in RULES.values()}


def run_case(
    case: dict[str, Any], name: str, overrides: dict[str, Any], dtype: torch.dtype
) -> tuple[PolicyLossOutput, Tensor]:
    """The output, and the gradient of log pi; tokens that do not learn hold NaN."""
    learns = torch.tensor(case["learns"])

    def tensor(key: str) -> Tensor:
        values = torch.tensor(case[key], dtype=dtype)
        return torch.where(learns if values.dim() == 1 else learns[:, None], values, math.nan)

    ids = torch.tensor(case["topk_ids"])
    if "top_k" in (objective := preset(name)).fields_in_use:
        overrides = {**overrides, "top_k": ids.shape[1]}
    objective = preset(name, **overrides)
    log_probs = tensor("log_probs").requires_grad_()
    out = policy_loss(
        objective,
        PolicyLossInputs(
            log_probs=log_probs,
            rollout_log_probs=tensor("rollout_log_probs"),
            advantages=tensor("advantages"),
            loss_mask=learns,
            old_log_probs=tensor("old_log_probs"),
            topk=TopKLogProbs(ids, tensor("topk_rollout_log_probs"), tensor("topk_log_probs")),
            targets=torch.tensor(case["targets"]),
            response_lengths=torch.tensor(case["lengths"]),
        ),
    )
    out.loss_sum.backward()
    assert log_probs.grad is not None
    return out, log_probs.grad


@pytest.mark.parametrize("name", RULES)
@BOTH_DTYPES
def test_vectors(name: str, dtype: torch.dtype):
    case, rule = RULES[name]
    rtol, atol, roundoff = (1e-11, 1e-13, 1e-13) if dtype == torch.float64 else (5e-5, 3e-6, 1e-5)
    out, grad = run_case(case, rule["preset"], rule["overrides"], dtype)
    assert {out.loss_sum.dtype, out.weight.dtype, out.coefficient.dtype} == {dtype}
    is_decided = torch.tensor([margin is None or margin > roundoff for margin in rule["margin"]])
    assert bool(is_decided.all()) or dtype == torch.float32
    weight, coefficient = (torch.tensor(rule[name], dtype=torch.float64) for name in ("weight", "coefficient"))
    slope = torch.tensor(rule.get("slope", [-c for c in rule["coefficient"]]), dtype=torch.float64)
    for found, expected in ((out.weight, weight), (out.coefficient, coefficient), (grad, slope)):
        found = torch.where(is_decided, found.double(), expected)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    if bool(is_decided.all()):
        assert float(out.loss_sum.detach()) == pytest.approx(rule["loss"], rel=rtol, abs=20 * atol)


def test_each_preset_drops_or_weighs_some_tokens_of_each_sign():
    for objective in FIELD:
        for sign in (1, -1):
            weights = {
                weight
                for case, rule in RULES.values()
                if rule["preset"] == objective.name
                for weight, A, learns in zip(rule["weight"], case["advantages"], case["learns"], strict=True)
                if learns and A * sign > 0
            }
            assert 1.0 in weights and len(weights) > 1, (objective.name, sign)


@pytest.mark.parametrize("name", OTHERS)
def test_other_frameworks_find_the_same(name: str):
    """`slope` is their loss's gradient by log pi, times what they divide by; they add 1e-8 to denominators."""
    other = OTHERS[name]
    case = CASES[other["case"]]
    out, slope = run_case(case, other["preset"], other["overrides"], torch.float64)
    if "slope" in other:
        torch.testing.assert_close(
            slope, torch.tensor(other["slope"], dtype=torch.float64), rtol=1e-7, atol=2e-8
        )
    else:  # a mask, whatever A is
        has_update = (torch.tensor(case["advantages"]) != 0) & torch.tensor(case["learns"])
        theirs = torch.tensor(other["weight"], dtype=torch.float64)
        assert torch.equal(out.weight[has_update], theirs[has_update])


def test_presets_and_frameworks_with_vectors():
    asked = {(other["preset"], other["framework"]) for other in VECTORS["others"]}
    assert asked == {
        ("ipo", "prime-rl"),
        ("drpo", "UniRL"),
        ("cppo", "UniRL"),
        *(("sapo", framework) for framework in ("TRL", "verl")),
        *(("gspo", framework) for framework in ("TRL", "verl", "slime")),
        *(("icepop", framework) for framework in ("NeMo-RL", "slime")),
        *(("mis", framework) for framework in ("NeMo-RL", "verl")),
        *(("gmpo", framework) for framework in ("TRL", "verl")),
        *(("vespo", framework) for framework in ("TRL", "VESPO")),
    }
