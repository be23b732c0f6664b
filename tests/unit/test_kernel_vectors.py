"""The kernels against the exact values of tests/vectors/dppo_vectors.json, from its logits."""

import math
from itertools import groupby
from typing import Any

import pytest
import torch

from megatron_dppo.algorithms import preset
from megatron_dppo.kernels import reference
from megatron_dppo.kernels.reference import ROWS
from tests.support.dppo_vectors import CASES, SETTINGS, VECTORS, assert_exact, build, log_softmax
from tests.support.kernel_host import Tokens, combined, run

WIDTH = max(case["V"] for case in CASES)
TOP_K = max(len(case["topk_ids_mu"]) for case in CASES)


def tokens_of(cases: list[dict], dtype: torch.dtype) -> Tokens:
    """Cases of one temperature, vocabularies padded with tokens of no probability, Top-K with -1."""

    def padded(values: torch.Tensor, size: int, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, size - len(values)), value=value)

    rows = []
    for case in cases:
        ids, a = torch.tensor(case["topk_ids_mu"]), case["a"]
        mu, old = (log_softmax(case, which, torch.float64)[1].detach() for which in ("mu", "old"))
        logits = log_softmax(case, "pi", dtype)[0].detach()
        columns = padded(logits, WIDTH, -math.inf), padded(ids, TOP_K, -1), padded(mu[ids], TOP_K, math.nan)
        rows.append((*columns, mu[a], old[a]))
    logits, ids, topk_mu, mu, old = map(torch.stack, zip(*rows, strict=True))
    return Tokens.of(
        mu.to(dtype),
        logits=logits,
        targets=torch.tensor([case["a"] for case in cases]),
        topk_ids=ids.int(),
        topk_rollout_log_probs=topk_mu.to(dtype),
        old_log_probs=old.to(dtype),
        advantages=torch.tensor([case["A"] for case in cases], dtype=dtype),
        temperature=cases[0]["T"],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_vectors(kernels: Any, setting: str, num_shards: int, dtype: torch.dtype) -> None:
    if kernels is not reference and dtype == torch.float64:
        return  # the compiled kernels have no such type
    num_decided = 0
    for _, group in groupby(sorted(CASES, key=lambda case: case["T"]), key=lambda case: case["T"]):
        cases = list(group)
        result = run(kernels, tokens_of(cases, dtype), build(setting, TOP_K), num_shards=num_shards)
        for row, case in enumerate(cases):
            found = {name: values[row].item() for name, values in result.rows.items()}
            num_decided += assert_exact(setting, case, found, result.gradient[row].tolist(), dtype)
    assert num_decided > 0.9 * len(CASES)


@pytest.mark.parametrize("case", VECTORS["prob_level"], ids=lambda case: case["note"][:30])
def test_exact_probabilities(kernels: Any, case: dict) -> None:
    if case["mu_a"] == 0:
        return  # no learning token has that: policy_loss refuses it
    mu, pi = (torch.tensor([case[p]]).log() for p in ("mu_a", "pi_a"))
    tokens = Tokens.of(mu, advantages=torch.tensor([case["A"]], dtype=torch.float32))
    statistics = torch.tensor([[[0.0, 1.0, 0.0, pi.item() / math.log(2)]]])
    is_exact = "2^-30" not in case["note"]  # float32's exp rounds that case onto the threshold, or just below
    expected = {
        "dppo_binary_tv": (case["tv_bin"], case["mask_tv_strict"]),
        "dppo_binary_kl": (case["kl_bin"], case["mask_kl_strict"]),
        "negative_mask": (case["tv_bin"], case["mask_neg_geq"]),
    }
    for name, (divergence, mask) in expected.items():
        planes, _ = combined(kernels, tokens, statistics, preset(name, delta=case["delta"]))
        got = dict(zip(ROWS, planes[:, 0].tolist(), strict=True))
        assert got["divergence"] == pytest.approx(float(divergence), abs=1e-6), name
        assert got["weight"] == mask or (name == "negative_mask" and not is_exact), name
        assert got["ratio"] == pytest.approx(case["ratio"], rel=1e-6), name
