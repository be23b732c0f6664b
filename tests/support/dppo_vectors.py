"""tests/vectors/dppo_vectors.json: exact values (mpmath, 60 digits), and how its settings are called here."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, preset

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "dppo_vectors.json").read_text())
CASES = VECTORS["cases"]

SETTINGS = {
    "PG-IS": ("pg_is", {}),
    "PG-TIS_C3": ("pg_tis", {}),
    "CISPO_C5": ("cispo", {}),
    "GRPO_0.2_0.2": ("grpo", {}),
    "GRPO-ClipHigher_0.2_0.28": ("grpo_clip_higher", {}),
    "GRPO-ClipHigher_0.2_0.27_C5": ("grpo_clip_higher", {"eps_high": 0.27, "ratio_cap": 5}),
    "MiniRL": ("minirl", {}),
    "MiniRL-TIS_C3": ("minirl_tis", {}),
    "DPPO-Binary-TV_0.15": ("dppo_binary_tv", {}),
    "DPPO-Binary-TV_0.2_C5": ("dppo_binary_tv", {"delta": 0.2, "ratio_cap": 5}),
    "DPPO-Binary-KL_0.05": ("dppo_binary_kl", {}),
    "DPPO-Binary-KL_0.05_C5": ("dppo_binary_kl", {"ratio_cap": 5}),
    "DPPO-TopK-TV_0.2_C5": ("dppo_topk_tv", {"ratio_cap": 5}),
    "DPPO-TopK-TV-noother_0.2_C5": ("dppo_topk_tv", {"ratio_cap": 5, "include_other": False}),
    "DPPO-TopK-TV-replace_0.2_C5": ("dppo_topk_tv", {"ratio_cap": 5, "sampled_token": "replace"}),
    "DPPO-TopK-KL_0.05_C5": ("dppo_topk_kl", {"ratio_cap": 5}),
    "DPPO-TopK-KL-replace_0.05_C5": ("dppo_topk_kl", {"ratio_cap": 5, "sampled_token": "replace"}),
    "DPPO-Binary-KL-Decoupled_0.05": ("dppo_binary_kl_decoupled", {}),
    "DPPO-Binary-TV-Decoupled_0.15": ("dppo_binary_tv_decoupled", {}),
    "Mask-0.5": ("negative_mask", {}),
    "Mask-0.8": ("negative_mask", {"delta": 0.8}),
    "Mask-0.5-Recompute": ("negative_mask_recomputed", {}),
    "Relax-high_a0.1": ("relax_high", {}),
    "Relax-low_a0.1": ("relax_low", {}),
    "Relax-both_a0.1": ("relax_both", {}),
}
# Column of the vectors' D that `divergence` must equal.
DIVERGENCE_COLUMNS = {
    "dppo_topk_tv": "tv_topk_union_with_other",
    "dppo_topk_kl": "kl_topk_union",
    "dppo_binary_kl": "kl_bin",
    "dppo_binary_kl_decoupled": "kl_bin_old",
    "dppo_binary_tv_decoupled": "tv_bin_old",
    "minirl": "tv_bin_old",
    "minirl_tis": "tv_bin_old",
    "negative_mask_recomputed": "tv_bin_old",
}
OVERRIDDEN_COLUMNS = {
    "DPPO-TopK-TV-noother_0.2_C5": "tv_topk_union_no_other",
    "DPPO-TopK-TV-replace_0.2_C5": "tv_topk_replace_with_other",
    "DPPO-TopK-KL-replace_0.05_C5": "kl_topk_replace",
}


def build(setting: str, top_k: int) -> Objective:
    name, overrides = SETTINGS[setting]
    return preset(name, **overrides, **({"top_k": top_k} if "topk" in name else {}))


def log_softmax(case: dict, which: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = torch.tensor([float(x) for x in case[f"logits_{which}"]], dtype=dtype, requires_grad=True)
    return logits, torch.log_softmax(logits / case["T"], -1)


def column(setting: str) -> str:
    return OVERRIDDEN_COLUMNS.get(setting) or DIVERGENCE_COLUMNS.get(SETTINGS[setting][0], "tv_bin")


def is_decided(expected: dict, ratio: float, roundoff: float) -> bool:
    return expected["margin"] is None or expected["margin"] > roundoff * max(1.0, ratio)


# Relative and absolute errors, and how near to a threshold rounding may decide.
TOLERANCES = {torch.float64: (1e-11, 1e-13, 1e-12), torch.float32: (5e-5, 3e-6, 1e-5)}


def assert_exact(
    setting: str, case: dict, found: Mapping[str, float], gradient: list[float], dtype: torch.dtype
) -> bool:
    """Compare a token's results, and its gradient by the logits; false if rounding may decide its mask.

    `found` has the names of `kernels.reference.ROWS`, the entropy if it is known.
    """
    rtol, atol, roundoff = TOLERANCES[dtype]
    expected, where = case["algos"][setting], f"{setting} {case['id']} {case['tag']}"

    def close(actual: float, exact: object, atol: float = atol) -> None:
        assert actual == pytest.approx(float(str(exact)), rel=rtol, abs=atol), where

    close(found["ratio"], case["ratio"])
    close(found["divergence"], case["D"][column(setting)])
    if "entropy" in found:
        close(found["entropy"], case["entropy_pi"])
    if not is_decided(expected, case["ratio"], roundoff):
        return False
    assert found["weight"] == expected["mask"], where
    close(found["coefficient"], expected["coef"])
    wide = atol * (1 + abs(expected["coef"]))
    close(found["loss"], expected["loss_sg"], wide)
    for actual, exact in zip(gradient[: case["V"]], expected["dlogits"], strict=True):
        close(actual, exact, wide)
    assert not any(gradient[case["V"] :]), where
    return True
