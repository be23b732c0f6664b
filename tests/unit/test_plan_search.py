"""Proposed layouts divide the model, fit, and come in a sensible order; advice names what is not needed."""

import time
from typing import Any

import pytest

from megatron_dppo.architectures.layout import layers_of_stages
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import FULL, NETWORK_BYTES_PER_S, NVLINK_BYTES_PER_S, Job, Machine
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.plan import advise
from megatron_dppo.plan.search import (
    divisible_layouts,
    fewest_gpus,
    fits,
    numbers_to_try,
    propose,
    recompute_choices,
    why_not_enough,
)
from tests.support.plan_models import COLOCATED, GB, QWEN3_8B, QWEN3_30B, RECOMPUTED, job_of, layout_of

SMALL = QWEN3_30B | {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1000}
SPLIT = {"parallel.tensor": 4, "parallel.expert": 8, "parallel.expert_tensor": 1}
PARKED = {"optimizer.offload": True}


@pytest.mark.parametrize("content", [QWEN3_30B, QWEN3_8B], ids=["experts", "dense"])
@pytest.mark.parametrize("num_gpus", [1, 8, 12])
def test_divisible_layouts_divide(content: dict[str, Any], num_gpus: int) -> None:
    job = job_of(content, num_gpus=num_gpus)
    layouts = [job.having(settings).layout for settings in divisible_layouts(job)]
    assert len(set(layouts)) == len(layouts) > 0
    for size in ("tensor", "pipeline", "virtual_pipeline", "context"):
        assert (max(getattr(layout, size) for layout in layouts) > 1) == (num_gpus > 1), size
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == num_gpus
        assert content["num_key_value_heads"] % layout.tensor == 0
        if layout.virtual_pipeline > 1:
            assert content["num_hidden_layers"] % (layout.pipeline * layout.virtual_pipeline) == 0
        else:
            assert layers_of_stages(content["num_hidden_layers"], layout.pipeline)
        assert content.get("num_experts", 1) % layout.expert == 0
        assert num_gpus % (layout.expert * layout.expert_tensor * layout.pipeline) == 0


def test_settings_are_what_differs_from_the_config() -> None:
    job = job_of(settings=SPLIT, num_gpus=16)
    layouts = list(divisible_layouts(job))
    assert {} in layouts
    assert {"parallel.context": 2} in layouts
    assert {"parallel.tensor": 2} in layouts
    unsaid = job_of(settings={"parallel.tensor": 4}, num_gpus=16)  # experts are split as the rest is
    assert {"parallel.tensor": 2} in list(divisible_layouts(unsaid))
    assert {"parallel.expert": 8, "parallel.expert_tensor": 1} in list(divisible_layouts(unsaid))


def test_recompute_is_varied_as_far_as_set_can_reach() -> None:
    """A key of [megatron] cannot be unset from the command line, and Megatron refuses some of them together."""
    granularities = [each.get("megatron.recompute_granularity") for each in recompute_choices(job_of())]
    assert granularities == [None, "selective", "selective", "full"]
    assert recompute_choices(job_of(settings=RECOMPUTED)) == [{}]
    selective = {"megatron.recompute_granularity": "selective"}
    choices = recompute_choices(job_of(settings=selective))
    assert [each.get("megatron.recompute_granularity") for each in choices] == [None, "selective", "full"]


def test_states_stay_on_the_host_where_they_are_configured_to_be() -> None:
    job = job_of(settings=PARKED, num_gpus=16)
    assert not any("optimizer.offload" in proposal.settings for proposal in propose(job).proposals)
    others = propose(job_of(num_gpus=16)).proposals
    assert {proposal.settings.get("optimizer.offload") for proposal in others} == {None, True}


def test_the_largest_search_takes_seconds() -> None:
    started = time.process_time()
    assert propose(job_of(num_gpus=512, settings={"rollout.prompts_per_rollout": 512})).proposals
    assert time.process_time() - started < 20


def _seconds(job: Job, num_gpus: int = 8, **sizes: int) -> float:
    return step_time(job, layout_of(num_gpus, **sizes)).total


def test_the_cost_model_prefers_less_communication() -> None:
    dense = job_of(QWEN3_8B)
    data, tensor, context, pipeline = (
        _seconds(dense, **sizes) for sizes in ({}, {"tensor": 4}, {"context": 4}, {"pipeline": 4})
    )
    assert data < min(tensor, context, pipeline)
    assert pipeline > tensor
    assert _seconds(dense, tensor=2) < _seconds(dense, tensor=4)
    interleaved = _seconds(dense, pipeline=4, virtual_pipeline=3)
    assert data < interleaved < pipeline


def test_experts_stay_within_a_node() -> None:
    job = job_of(num_gpus=32, settings={"algorithm.minibatches_per_rollout": 1})
    assert _seconds(job, 32, expert=8) < _seconds(job, 32, expert=16)
    machine = Machine(32, 80 * GB)
    assert machine.link(8) / machine.link(16) == NVLINK_BYTES_PER_S / NETWORK_BYTES_PER_S


def test_recompute_and_states_on_the_host_cost_time() -> None:
    layout = layout_of(8, expert=8)
    tables: list[dict[str, Any]] = [
        {},
        {"megatron.recompute_granularity": "selective"},
        {"megatron.recompute_granularity": "selective", "megatron.recompute_modules": ["core_attn", "moe"]},
        RECOMPUTED,
    ]
    times = [step_time(job_of(settings=table), layout).total for table in tables]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    parked = step_time(job_of(settings=PARKED), layout)
    states = memory_of(job_of(settings=PARKED), layout).host.per_rank["optimizer"]
    assert parked.optimizer == pytest.approx(2 * states / (64e9 * 0.7))  # there and back
    assert parked.total == pytest.approx(times[0] + parked.optimizer)


def test_the_fewest_gpus_for_30b_are_two_nodes_of_80_gb() -> None:
    settings = COLOCATED | {"sglang.tp_size": 8, "sglang.mem_fraction_static": 0.7}
    proposal = propose(job_of(settings=settings, num_gpus=16)).proposals[0]
    assert fewest_gpus(job_of(settings=settings)) == (16, proposal)
    assert not any(propose(job_of(settings=settings, num_gpus=num_gpus)).proposals for num_gpus in range(1, 9))


def test_numbers_of_gpus_that_are_no_power_of_two_are_tried() -> None:
    numbers = numbers_to_try(Machine(8, 80 * GB))
    assert numbers[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32]
    assert numbers[-1] == 512
    assert numbers_to_try(Machine(8, 80 * GB, gpus_per_node=4))[:6] == [1, 2, 3, 4, 8, 12]
    fewest = fewest_gpus(job_of(QWEN3_8B, gpu_bytes=48 * GB, num_gpus=1))
    assert fewest is not None and fewest[0] == 5


@pytest.mark.parametrize(
    ("settings", "gpu_bytes", "reason"),
    [
        (COLOCATED, 10 * GB, "The engine's cache holds 0 tokens next to 56.9 GiB"),
        (
            COLOCATED | {"sglang.tp_size": 8},
            20 * GB,
            "The engine alone takes 20.9 of 18.6 GiB of each GPU. Lower sglang.mem_fraction_static",
        ),
        ({"rollout.engine": "transformers"}, 60 * GB, "The engine alone takes 6"),
        ({"rollout.prompts_per_rollout": 63}, 80 * GB, ""),
    ],
)
def test_nothing_fits_on_any_number_of_gpus(settings: dict[str, Any], gpu_bytes: int, reason: str) -> None:
    job = job_of(QWEN3_30B, settings, gpu_bytes=gpu_bytes)
    assert fewest_gpus(job) is None
    why_not = why_not_enough(job.on(512))
    assert why_not.startswith(reason) and bool(why_not) == bool(reason)
    assert ("Set rollout.engine = 'sglang'" in why_not) == ("rollout.engine" in settings)


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        (SPLIT, "What decides optimizer: optimizer.offload."),
        (
            SPLIT | {"rollout.max_response_tokens": 16384, "parallel.max_tokens_per_microbatch": 24576},
            "What decides activations: parallel.max_tokens_per_microbatch and megatron.recompute_granularity.",
        ),
        (
            {"rollout.engine": "transformers"} | SPLIT | PARKED | RECOMPUTED,
            "What decides engine cache: rollout.engine.",
        ),
    ],
)
def test_advice_names_what_decides_the_largest_component(settings: dict[str, Any], advised: str) -> None:
    job = job_of(settings=settings, num_gpus=8 if settings == SPLIT else 16)
    memory = memory_of(job, job.layout)
    assert not fits(job, memory)
    assert [advice.text for advice in advise(job, memory)] == [advised]


def test_advice_for_a_small_host_names_the_largest_component_of_a_rank() -> None:
    job = job_of(SMALL, num_gpus=1, host_bytes=GB)
    (advice,) = advise(job, memory_of(job, job.layout))
    assert advice.text == "What decides checkpoint in flight: checkpoint.asynchronous."


def test_an_offload_that_is_not_needed_is_named_until_it_is_off() -> None:
    job = job_of(SMALL, settings={"optimizer.offload": True}, num_gpus=1)
    (offload,) = advise(job, memory_of(job, job.layout))
    assert offload.settings == {"optimizer.offload": False}
    without = job.having(offload.settings)
    assert list(advise(without, memory_of(without, without.layout))) == []


def test_a_recompute_that_is_not_needed_is_named() -> None:
    job = job_of(SMALL, RECOMPUTED, num_gpus=1)
    (lazy,) = advise(job, memory_of(job, job.layout))
    assert "fits without recompute too" in lazy.text
    assert lazy.text.endswith(" ".join(f"--set megatron.{key}=none" for key in dict(FULL.keys())))
