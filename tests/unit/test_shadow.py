"""Shadow masks: what each objective alone would have masked, bit by bit."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from megatron_dppo.algorithms import (
    PRESETS,
    PolicyLossInputs,
    TopKLogProbs,
    policy_loss,
    preset,
    shadow_masks,
    shadow_weights,
)
from tests.support.dppo_vectors import CASES, SETTINGS, build, is_decided, log_softmax
from tests.unit.test_algorithms_properties import FEW, Policies, policies


def _require_equal(objectives, inputs: PolicyLossInputs):
    masks, weights = shadow_masks(objectives, inputs), shadow_weights(objectives, inputs)
    assert list(masks) == list(weights) == list(objectives)
    for name, objective in objectives.items():
        expected = policy_loss(objective, inputs)
        assert masks[name].dtype == torch.bool and masks[name].equal(expected.mask), name
        assert weights[name].equal(expected.weight), name
        assert not masks[name].requires_grad


@FEW
@given(policies)
def test_masks_are_those_of_each_objective_alone(p: Policies):
    """Fewer columns than some objectives would use, other thresholds, other partitions, and rows of NaN."""
    others = {
        "tight": preset("dppo_topk_tv", delta=0.01, top_k=3, sampled_token="replace"),
        "as printed": preset("dppo_topk_tv", include_other=False, top_k=5),
        "with bonus": preset("dppo_binary_kl", delta=1e-3, entropy_coef=0.1),
    }
    inputs = p.inputs(k=8)
    inputs = replace(inputs, entropy=torch.zeros_like(inputs.log_probs))
    _require_equal({**PRESETS, **others}, inputs)
    is_learning = torch.arange(p.advantages.numel()) % 3 != 0

    def holed(values: torch.Tensor) -> torch.Tensor:
        rows = is_learning if values.dim() == 1 else is_learning[:, None]
        return torch.where(rows, values, math.nan)

    topk = inputs.topk
    assert topk is not None and inputs.old_log_probs is not None
    _require_equal(
        PRESETS,
        replace(
            inputs,
            log_probs=holed(inputs.log_probs),
            rollout_log_probs=holed(inputs.rollout_log_probs),
            advantages=holed(inputs.advantages),
            old_log_probs=holed(inputs.old_log_probs),
            topk=TopKLogProbs(topk.ids, holed(topk.rollout_log_probs), holed(topk.log_probs)),
            loss_mask=is_learning,
        ),
    )


@pytest.mark.parametrize("seed", range(3))
def test_float32_too(seed: int):
    _require_equal(PRESETS, Policies(seed, 16, 2.0, 0.5, dtype=torch.float32).inputs())


def test_objectives_without_their_inputs_are_left_out():
    inputs = Policies(1, 12, 2.0, 0.3).inputs()
    recomputed = {name for name, objective in PRESETS.items() if objective.anchor == "recomputed"}
    topk = {name for name, objective in PRESETS.items() if objective.needs_topk}
    assert set(shadow_masks(PRESETS, replace(inputs, old_log_probs=None))) == set(PRESETS) - recomputed
    assert set(shadow_masks(PRESETS, replace(inputs, topk=None))) == set(PRESETS) - topk
    over_responses = {name for name, objective in PRESETS.items() if objective.needs_responses}
    assert set(shadow_masks(PRESETS, replace(inputs, response_lengths=None))) == set(PRESETS) - over_responses
    assert shadow_masks({}, inputs) == {}


def test_a_value_that_the_loss_refused_is_no_error():
    """The loss has spoken before; a diagnostic must not end the run that the loss lets go on."""
    inputs = Policies(1, 12, 2.0, 0.3).inputs()
    broken = inputs.rollout_log_probs.clone()
    broken[0] = math.nan
    assert shadow_masks(PRESETS, replace(inputs, rollout_log_probs=broken)).keys() == PRESETS.keys()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_vectors(dtype: torch.dtype):
    """All settings of the exact vectors at once, each case a micro-batch of one token."""
    roundoff, num_decided = (1e-12, 0) if dtype == torch.float64 else (1e-5, 0)
    for case in CASES:
        pi, mu, old = (log_softmax(case, which, dtype)[1].detach() for which in ("pi", "mu", "old"))
        a, ids = case["a"], torch.tensor(case["topk_ids_mu"])
        inputs = PolicyLossInputs(
            log_probs=pi[a : a + 1],
            rollout_log_probs=mu[a : a + 1],
            advantages=torch.tensor([case["A"]], dtype=dtype),
            old_log_probs=old[a : a + 1],
            topk=TopKLogProbs(ids[None], mu[ids][None], pi[ids][None]),
            targets=torch.tensor([a]),
        )
        masks = shadow_masks({setting: build(setting, case["K"]) for setting in SETTINGS}, inputs)
        for setting, mask in masks.items():
            expected = case["algos"][setting]
            if is_decided(expected, case["ratio"], roundoff):
                num_decided += 1
                assert bool(mask) == bool(expected["mask"]), (setting, case["id"])
    assert num_decided > 0.9 * len(CASES) * len(SETTINGS)
