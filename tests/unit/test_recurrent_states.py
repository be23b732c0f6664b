"""The embedded engine with recurrent states: each sequence has its own, whichever one had the slot before."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig

from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.embedded.continuous_batch import ContinuousBatch
from tests.unit.test_transformers_engine import (
    MIXED_LENGTHS,
    VOCAB,
    engine_of,
    largest_error,
    moe_config,
    reference_model,
    requests_of,
    teacher_forced,
)


def hybrid_config() -> Qwen3NextConfig:
    """Linear attention in the first and in the last layer."""
    sizes: dict[str, Any] = moe_config().to_diff_dict() | {"rope_parameters": None}
    return Qwen3NextConfig(
        **sizes,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    )


@pytest.fixture(scope="module")
def model() -> Any:
    made = reference_model(hybrid_config())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3)  # or states would forget everything within a token
    return made


def test_slots_are_refilled_and_routes_recorded_as_in_a_full_forward(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths, some of one token, some alike, are admitted together and one by one."""
    monkeypatch.setattr(ContinuousBatch, "SWEEP_FRACTION", 0.5)
    eos, requests = tuple(range(0, VOCAB, 5)), requests_of([*MIXED_LENGTHS, 1, 7])
    requests += [
        replace(requests[0], id="again", noise_key=(3, 1, 90)),
        replace(requests[5], id="too", noise_key=(3, 1, 91)),
    ]
    engine = engine_of(model, eos_token_ids=eos, batch_size=4)
    completions = engine.generate(requests, SamplingParams(max_response_tokens=6, capture_routes=True))
    assert len({each.tokens.numel() for each in completions}) > 3
    for request, completion in zip(requests, completions, strict=True):
        logits, choices = teacher_forced(model, request, completion)
        expected = torch.log_softmax(logits, -1).gather(1, completion.tokens[:, None])[:, 0]
        limit = largest_error(model, request, completion)
        torch.testing.assert_close(completion.log_probs, expected, atol=limit, rtol=0)
        assert completion.routed_experts is not None
        assert torch.equal(completion.routed_experts.indices.long(), choices)


ROUNDS = (12, 1, 9, 2, 12, 3, 2, 1, 7, 1)


@pytest.mark.parametrize("config", [hybrid_config, moe_config])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_every_slot_is_refilled_as_if_it_were_new(config: Any, num_slots: int) -> None:
    """All slots get prompts of one length at a time: long ones, then of one token, of two, and of three.

    A fresh engine samples each of them alone. With one slot, the numbers are equal bit for bit.
    """
    made = reference_model(config())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3)
    requests = requests_of([length for length in ROUNDS for _ in range(num_slots)])
    params = SamplingParams(max_response_tokens=4, num_topk_log_probs=3, capture_routes=True)
    completions = engine_of(made, batch_size=num_slots).generate(requests, params)
    for request, found in zip(requests, completions, strict=True):
        (alone,) = engine_of(made, batch_size=1).generate([request], params)
        assert torch.equal(found.tokens, alone.tokens)
        exact: Any = {"rtol": 0, "atol": 0 if num_slots == 1 else largest_error(made, request, alone)}
        torch.testing.assert_close(found.log_probs, alone.log_probs, **exact)
        assert found.topk is not None and alone.topk is not None
        torch.testing.assert_close(found.topk.log_probs, alone.topk.log_probs, **exact)
        assert found.routed_experts is not None and alone.routed_experts is not None
        assert torch.equal(found.routed_experts.indices, alone.routed_experts.indices)


def test_a_response_that_began_earlier_ends_as_if_it_had_not_stopped(model: Any) -> None:
    """States are recomputed from its tokens, with requests of other lengths and progress in the batch."""
    engine, requests = engine_of(model, batch_size=3), requests_of(MIXED_LENGTHS)
    whole = engine.generate(requests, SamplingParams(max_response_tokens=6))
    begun = [
        part
        for half, num_tokens in ((requests[:6], 1), (requests[6:], 4))
        for part in engine.generate(half, SamplingParams(num_tokens))
    ]
    resumed = [replace(each, partial=part) for each, part in zip(requests, begun, strict=True)]
    completions = engine.generate(resumed, SamplingParams(6))
    for request, found, expected in zip(requests, completions, whole, strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        limit = largest_error(model, request, expected)
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=limit, rtol=0)


def test_building_an_engine_draws_no_random_numbers(model: Any) -> None:
    """Though transformers draws decays when it builds such a layer."""
    before = torch.get_rng_state()
    engine_of(model)
    assert torch.equal(before, torch.get_rng_state())
