"""The bound on a rollout's bytes holds, and is met where every response is as long as allowed."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_dppo.config.rollout import with_engine
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.batch_file import bytes_of
from megatron_dppo.data.batches.gradient_steps import gradient_steps
from megatron_dppo.data.batches.memory import bytes_of_routes_and_topk, bytes_of_samples, rollout_bytes_bound
from megatron_dppo.data.batches.packing import pack
from tests.support.ranks_on_threads import alone
from tests.support.samples import ROUTING, make_group, make_sample

PROMPT, RESPONSE, PROMPTS, SAMPLES = 3, 200, 4, 2
bound_of = partial(rollout_bytes_bound, shares_prefixes=False)


def run(epochs: int) -> Config:
    return Config.model_validate(
        {
            "data": {"max_prompt_tokens": PROMPT},
            "rollout": {
                "prompts_per_rollout": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "max_response_tokens": RESPONSE,
                "num_topk_log_probs": 2,
            },
            "algorithm": {"epochs_per_rollout": epochs, "minibatches_per_rollout": 2},
        }
    )


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("length", [RESPONSE, RESPONSE // 2])
def test_the_bound_holds(epochs: int, length: int) -> None:
    config, tokens = run(epochs), list(range(PROMPT + length))
    groups = [make_group(i, [make_sample(tokens, PROMPT) for _ in range(SAMPLES)]) for i in range(PROMPTS)]
    held = bytes_of_samples(sample for group in groups for sample in group.samples)
    steps, _ = gradient_steps(groups, 0, config, alone(), routing=ROUTING, shares_prefixes=False)
    held += sum(bytes_of(step) for step in steps)
    bound = bound_of(config, 1, 1, ROUTING)
    assert 0.9 * bound * length / RESPONSE < held <= bound
    assert bound_of(config, 1, 1, None) < bound
    with_kl = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"ref_kl_coef": 0.1})})
    num_tokens = epochs * PROMPTS * SAMPLES * (PROMPT + RESPONSE)
    assert bound_of(with_kl, 1, 1, ROUTING) == bound + 4 * num_tokens


@pytest.mark.parametrize("epochs", [1, 2])
def test_more_groups_hold_less_each_and_a_larger_group_holds_no_more_than_its_samples(epochs: int) -> None:
    config = run(epochs)
    one, two, four = (bound_of(config, n, n, ROUTING) for n in (1, 2, 4))
    assert one > two > four, "with a mini-batch on its way, and one sample beyond an equal share"
    split_model = bound_of(config, 4, 2, ROUTING)
    assert four < split_model < one


def test_routes_and_topk_are_counted_in_samples_and_micro_batches() -> None:
    sample = make_sample(list(range(10)), 4)
    assert bytes_of_routes_and_topk(sample) == 9 * 2 * 2 + 6 * 2 * 8
    packed = pack([replace(sample, token_weights=torch.ones(6))])
    assert bytes_of_routes_and_topk(packed) == 10 * 2 * 2 + 10 * 2 * 8
    assert bytes_of_routes_and_topk(replace(packed, topk=None, routed_experts=None)) == 0


@pytest.mark.parametrize("lag", [2, 200])
def test_rollouts_sampled_ahead_count_as_micro_batches(lag: int) -> None:
    """Rollouts waiting plus the one being sampled; a run of 100 rollouts never holds more."""
    config = run(2)
    tokens = list(range(PROMPT + RESPONSE))
    groups = [make_group(i, [make_sample(tokens, PROMPT) for _ in range(SAMPLES)]) for i in range(PROMPTS)]
    steps, _ = gradient_steps(groups, 0, config, alone(), routing=ROUTING, shares_prefixes=False)
    ahead = config.model_copy(update={"rollout": config.rollout.model_copy(update={"lag": lag})})
    more = bound_of(ahead, 1, 1, ROUTING) - bound_of(config, 1, 1, ROUTING)
    held = min(lag, 99) * sum(bytes_of(step) for step in steps)
    assert held <= more < 1.1 * held


@pytest.mark.parametrize(
    ("options", "num_more"),
    [
        ({"over_sampling": 2.5}, 6),
        ({"refill_zero_variance": True, "max_refills": 2}, 8),
        ({"max_staleness": 2, "over_sampling": 2.5}, 6 + 4),  # that many open, and one that trains
    ],
)
def test_groups_beyond_those_that_are_wanted_count(options: dict[str, Any], num_more: int) -> None:
    config, one = run(1), bytes_of_samples([make_sample(list(range(PROMPT + RESPONSE)), PROMPT)])
    served = with_engine(config.rollout, "sglang")
    more = config.model_copy(update={"rollout": served.model_copy(update=options)})
    bounds = [bound_of(each, 1, 1, ROUTING) for each in (config, more)]
    assert bounds[1] - bounds[0] == pytest.approx(num_more * SAMPLES * one, rel=0.02)
