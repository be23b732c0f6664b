"""The numbers of divergences, rules and options: Python writes capi.h's, and the kernels refuse all others."""

import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import DIVERGENCES, PRESETS, RULES, Divergence, Objective, preset
from megatron_dppo.algorithms.divergence import SampledToken, registry
from megatron_dppo.algorithms.objective import Anchor
from megatron_dppo.algorithms.paper_rules import Ratio, Relax
from megatron_dppo.errors import ConfigError
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss, library, ops
from megatron_dppo.kernels.build import CSRC
from megatron_dppo.kernels.encoding import (
    COMPILED,
    FLAGS,
    IDS,
    LOGITS_DTYPES,
    MAX_TOP_K,
    decode,
    encode,
    is_compiled,
)
from megatron_dppo.kernels.library import KernelLibrary
from megatron_dppo.kernels.reference import ROWS
from tests.support.kernel_host import combined, random_tokens, shards_of, statistics_of
from tests.support.loss_batches import make_batch, policy_loss_from_logits

PREFIXES = {"DppoRule": "DPPO_RULE_", "DppoRelax": "DPPO_RELAX_"}  # of the others: DPPO_
PYTHON: dict[str, Mapping[str, int]] = {
    "DppoDtype": {str(dtype).removeprefix("torch."): id for dtype, id in LOGITS_DTYPES.items()},
    "DppoRule": COMPILED["rule"],
    "DppoDivergence": COMPILED["divergence"],
    "DppoRelax": IDS["relax"],
    "DppoFlag": FLAGS,
    "DppoRow": {**{name: plane for plane, name in enumerate(ROWS)}, "num_rows": len(ROWS)},
}


def header() -> str:
    return re.sub(r"/\*.*?\*/", "", (CSRC / "capi.h").read_text(), flags=re.DOTALL)


def enums() -> dict[str, dict[str, int]]:
    """capi.h's, by name; every entry has its number written."""
    found: dict[str, dict[str, int]] = {}
    for enum, body in re.findall(r"enum (\w+) \{(.*?)\};", header(), flags=re.DOTALL):
        found[enum] = {}
        for entry in filter(None, map(str.strip, body.split(","))):
            written = re.fullmatch(r"(\w+) = (\d+)", entry)
            assert written is not None, f"{entry} of {enum} has no number"
            prefix = PREFIXES.get(enum, "DPPO_")
            assert written[1].startswith(prefix)
            found[enum][written[1].removeprefix(prefix).lower()] = int(written[2])
    return found


def test_python_and_c_write_the_same_numbers() -> None:
    assert enums() == PYTHON
    defined = dict(re.findall(r"#define (DPPO_\w+) (\d+)\n", header()))
    assert defined == {"DPPO_ABI_VERSION": str(library.ABI_VERSION), "DPPO_MAX_TOP_K": str(MAX_TOP_K)}


def test_compiled_rules_and_divergences_have_the_registered_ids() -> None:
    for known, registered in ((COMPILED["rule"], RULES), (COMPILED["divergence"], DIVERGENCES)):
        assert {name: registered[name].id for name in known} == known


def test_ids_are_unique_per_choice() -> None:
    choices = {"relax": get_args(Relax), "anchor": get_args(Anchor), "sampled_token": get_args(SampledToken)}
    assert {field: set(ids) for field, ids in IDS.items()} == {
        **{field: set(values) for field, values in choices.items()},
        "include_other": {False, True},
    }
    for ids in IDS.values():
        assert len(set(ids.values())) == len(ids)
    assert all(flag.bit_count() == 1 for flag in FLAGS.values())
    assert sum(FLAGS.values()).bit_count() == len(FLAGS)


def test_two_entries_with_one_id_are_refused() -> None:
    twice = {**DIVERGENCES, "mine": Divergence(squared_hellinger, id=2, over="sampled")}
    free = max(each.id for each in DIVERGENCES.values()) + 1
    message = f"DIVERGENCES: found id 2 of topk_tv and mine; expected a unique id for each. .*: {free} is free"
    with pytest.raises(ConfigError, match=message):
        registry("DIVERGENCES", twice)


def squared_hellinger(log_probs: Tensor, anchor_log_probs: Tensor) -> Tensor:
    """Squared Hellinger distance of {a, not a}. [T], [T] -> [T]."""
    p, q = log_probs.exp(), anchor_log_probs.exp()
    return 1 - (p * q).sqrt() - ((1 - p) * (1 - q)).sqrt()


def replace_registry(monkeypatch: pytest.MonkeyPatch, name: str, entries: Mapping[str, Any]) -> None:
    """As if the registry had been written so, for every module that imported it."""
    written = {"DIVERGENCES": DIVERGENCES, "RULES": RULES}[name]
    others = registry(name, entries)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron_dppo") and vars(module).get(name) is written:
            monkeypatch.setattr(module, name, others)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Objective:
    """An objective of a made-up divergence, which stands before all others."""
    made_up = Divergence(squared_hellinger, id=17, over="sampled")
    replace_registry(monkeypatch, "DIVERGENCES", {"made_up": made_up, **DIVERGENCES})
    return replace(preset("dppo_binary_tv", delta=1e-3), name="mine", divergence="made_up")


NAMES = "one that the compiled kernels know: binary_tv, binary_kl, topk_tv, topk_kl"
REFUSAL = rf"objective.divergence: found 'made_up' \(id 17\); expected {NAMES}\. Combine it in PyTorch"


def test_a_new_divergence_changes_no_other(
    host_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    tokens = random_tokens(24, 60, 5)
    statistics = statistics_of(host_library, tokens, shards_of(tokens, 1, 0.0), with_entropy=True)
    objectives = [preset(name, delta=0.01) for name in ("dppo_topk_tv", "dppo_topk_kl", "dppo_binary_kl")]
    before = [(encode(each), combined(host_library, tokens, statistics, each)[0]) for each in objectives]
    mine: Objective = request.getfixturevalue("mine")
    for objective, (code, planes) in zip(objectives, before, strict=True):
        assert encode(objective) == code
        assert replace(decode(code), name=objective.name) == objective
        assert torch.equal(combined(host_library, tokens, statistics, objective)[0], planes)
    with pytest.raises(ConfigError, match=REFUSAL):
        combined(host_library, tokens, statistics, mine)


def test_a_new_divergence_works_at_once(mine: Objective) -> None:
    batch = make_batch(torch.float64)
    expected, _ = policy_loss_from_logits(batch.logits, batch.microbatch, mine, batch.temperature)
    assert bool((batch.microbatch.loss_mask & ~expected.mask).any())
    of_logits = fused_policy_loss(batch.logits, **batch.arguments, objective=mine)
    of_hidden = fused_linear_policy_loss(batch.hidden, batch.weight, **batch.arguments, objective=mine)
    for out in (of_logits, of_hidden):
        torch.testing.assert_close(out.loss_sum, expected.loss_sum, rtol=1e-12, atol=0)
        torch.testing.assert_close(out.divergence, expected.divergence, rtol=1e-9, atol=1e-12)
        assert torch.equal(out.mask, expected.mask)


def test_a_new_divergence_works_between_the_compiled_kernels(
    mine: Objective, host_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(torch.float32)
    expected = fused_policy_loss(batch.logits, **batch.arguments, objective=mine)
    monkeypatch.setattr(ops, "kernels_of", lambda tensor: host_library)
    monkeypatch.setattr(ops, "is_compiled_for", lambda device_type: True)
    found = fused_policy_loss(batch.logits, **batch.arguments, objective=mine)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.divergence, expected.divergence, rtol=1e-4, atol=1e-6)
    assert torch.equal(found.mask, expected.mask)


UNKNOWN = {
    "ipo": r"rule: found 'distance' \(id 4\).*log_ratio_coef: found 0.001; expected 0.0",
    "grpo": r"ref_kl_coef: found 0.04; expected 0.0",
    "vespo": r"rule: found 'gamma' \(id 16\).*importance: found 'rule'; expected 'token'",
    "gspo": r"rule: found 'response_ratio' \(id 9\).*importance: found 'response'; expected 'token'",
}


OVERRIDES = {"ipo": {"log_ratio_coef": 0.001}, "grpo": {"ref_kl_coef": 0.04}}


@pytest.mark.parametrize("name", UNKNOWN)
def test_objectives_that_are_not_compiled_are_refused(name: str, host_library: KernelLibrary) -> None:
    tokens = random_tokens(8, 60, 5)
    statistics = statistics_of(host_library, tokens, shards_of(tokens, 1, 0.0), with_entropy=True)
    objective = preset(name, **OVERRIDES.get(name, {}))
    with pytest.raises(ConfigError, match=f"(?s){UNKNOWN[name]}"):
        combined(host_library, tokens, statistics, objective)
    with pytest.raises(ConfigError, match=f"(?s){UNKNOWN[name]}"):
        encode(objective)


@pytest.mark.parametrize("objective", PRESETS.values(), ids=lambda objective: objective.name)
def test_compiled_objectives_survive_encode_and_decode(objective: Objective) -> None:
    if is_compiled(objective):
        assert replace(decode(encode(objective)), name=objective.name) == objective
    else:
        with pytest.raises(ConfigError, match="compiled kernels know"):
            encode(objective)


class Renumbered(Ratio):
    id = 99


def test_a_rule_under_another_number_is_refused(
    host_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_registry(monkeypatch, "RULES", {**RULES, "ratio": Renumbered})
    tokens = random_tokens(8, 60, 5)
    statistics = statistics_of(host_library, tokens, shards_of(tokens, 1, 0.0), with_entropy=True)
    combined(host_library, tokens, statistics, preset("dppo_binary_tv"))
    message = r"objective.rule: found 'ratio' \(id 99\); .* know: none, ratio, divergence, negative"
    with pytest.raises(ConfigError, match=message):
        combined(host_library, tokens, statistics, preset("grpo"))


@pytest.mark.parametrize("field", ["rule", "divergence", "relax", "flags"])
def test_the_c_side_refuses_unknown_numbers(host_library: KernelLibrary, field: str) -> None:
    combine = ctypes.CDLL(str(host_library.path)).dppo_combine
    null = ctypes.c_void_p()

    def status(number: int) -> int:
        objective = library._Objective.of(preset("grpo", eps_low=0.1))
        setattr(objective, field, number)
        no_rows, one = ctypes.c_int64(0), ctypes.c_int(1)
        return combine(null, one, no_rows, one, *[null] * 8, ctypes.byref(objective), null, null, null)

    known = enums()[{"flags": "DppoFlag"}.get(field, f"Dppo{field.title()}")].values()
    # Flags are or-ed: any sum of them is known.
    is_known = {number: number in known if field != "flags" else number <= sum(known) for number in range(9)}
    is_known |= dict.fromkeys((-1, 17, 2**30), False)
    assert {number: status(number) == 0 for number in is_known} == is_known
    assert {status(number) for number, is_fine in is_known.items() if not is_fine} == {1}
