"""Proposed layouts divide the model, fit, and come in a sensible order; so does the advice."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from megatron_dppo.architectures.layout import layers_of_stages
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import FULL, NETWORK_BYTES_PER_S, NVLINK_BYTES_PER_S, Job, Machine
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.plan import Advice, advise, fewest_with_other_engine
from megatron_dppo.plan.search import (
    HEADROOM,
    admitted_layouts,
    divisible_layouts,
    fewest_gpus,
    fits,
    has_headroom,
    numbers_to_try,
    propose,
    recompute_choices,
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


def test_proposals_fit_with_room_to_spare_fastest_first() -> None:
    job = job_of(num_gpus=16, host_bytes=2000 * GB)
    found = propose(job)
    assert found.proposals
    for proposal in found.proposals:
        each = job.having(proposal.settings)
        assert not each.problems
        assert fits(each, proposal.memory)
        assert proposal.memory.peak <= (1 - HEADROOM) * job.machine.gpu_bytes
        assert proposal.memory.host.per_node <= 2000 * GB
        assert memory_of(each, each.layout).peak == proposal.memory.peak
        assert step_time(each, each.layout) == proposal.time
    seconds = [proposal.time.total for proposal in found.proposals]
    assert seconds == sorted(seconds)
    plain = [replace(proposal.layout, virtual_pipeline=1) for proposal in found.proposals]
    assert len(set(plain)) == len(plain)


def test_layouts_that_train_refuses_are_not_proposed() -> None:
    settings = {"rollout.prompts_per_rollout": 4, "algorithm.minibatches_per_rollout": 4}
    job = job_of(QWEN3_8B, settings)
    admitted = [job.having(each).layout.data for each in admitted_layouts(job)]
    found = propose(job)
    assert set(admitted) == {1}
    assert found.num_admitted == len(admitted) < len(list(divisible_layouts(job)))
    assert found.proposals
    assert {proposal.layout.data for proposal in found.proposals} == {1}


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
    fewest = fewest_gpus(job_of(settings=settings))
    assert fewest.num_gpus == 16
    assert fewest.proposal is not None
    assert fewest.proposal == propose(job_of(settings=settings, num_gpus=16)).proposals[0]
    assert not any(propose(job_of(settings=settings, num_gpus=num_gpus)).proposals for num_gpus in range(1, 9))


def test_numbers_of_gpus_that_are_no_power_of_two_are_tried() -> None:
    numbers = numbers_to_try(Machine(8, 80 * GB))
    assert numbers[:11] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32]
    assert numbers[-1] == 512
    assert numbers_to_try(Machine(8, 80 * GB, gpus_per_node=4))[:6] == [1, 2, 3, 4, 8, 12]
    assert fewest_gpus(job_of(QWEN3_8B, gpu_bytes=48 * GB, num_gpus=1)).num_gpus == 5


@pytest.mark.parametrize(
    ("settings", "gpu_bytes", "reason"),
    [
        (
            COLOCATED,
            10 * GB,
            r"The engine's cache holds 0 tokens next to 56.9 GiB .* Raise sglang\.mem_fraction",
        ),
        (
            COLOCATED | {"sglang.tp_size": 8},
            20 * GB,
            r"The engine alone takes 20.9 of 18.6 GiB of each GPU. Lower sglang.mem_fraction_static",
        ),
        (
            {"rollout.prompts_per_rollout": 63},
            80 * GB,
            r"train admits no layout on any of them .* Without any split: rollout.prompts_per_rollout: found",
        ),
    ],
)
def test_why_nothing_fits_is_said(settings: dict[str, Any], gpu_bytes: int, reason: str) -> None:
    fewest = fewest_gpus(
        job_of(SMALL | {"num_hidden_layers": 4} if not settings else QWEN3_30B, settings, gpu_bytes=gpu_bytes)
    )
    assert fewest.proposal is None
    assert fewest.num_gpus == 512
    assert re.match(reason, fewest.why_not), fewest.why_not


def test_what_takes_most_is_said_where_nothing_fits() -> None:
    fewest = fewest_gpus(job_of(SMALL, gpu_bytes=22 * GB // 10))
    assert fewest.proposal is None
    reason = r"A GPU holds least with .* on \d+ GPUs. Does not fit: .* of 2.0 GiB .*, most of it reserve"
    assert re.match(reason, fewest.why_not), fewest.why_not


def _advice(job: Job) -> Advice:
    (advice,) = advise(job, memory_of(job, job.layout), propose(job))
    return advice


def _follows(job: Job, advice: Advice) -> bool:
    """Whether what is advised is admitted and fits with as much as the sentence says."""
    followed = job.having(advice.settings)
    memory = memory_of(followed, followed.layout)
    assert f"{memory.peak / 2**30:.1f} GiB" in advice.text
    return has_headroom(followed, memory) and not followed.problems


def test_advice_that_is_followed_makes_the_run_fit() -> None:
    long = {"rollout.max_response_tokens": 16384, "parallel.max_tokens_per_microbatch": 24576}
    job = job_of(settings=SPLIT | long, num_gpus=16)
    advice = _advice(job)
    assert advice.text.startswith("Recompute activations: ")
    assert advice.settings == RECOMPUTED
    assert _follows(job, advice)


def test_advice_to_keep_states_on_the_host() -> None:
    long = {"rollout.max_response_tokens": 31744, "parallel.max_tokens_per_microbatch": 32768}
    job = job_of(settings=SPLIT | RECOMPUTED | long, num_gpus=64, gpu_bytes=36 * GB)
    advice = _advice(job)
    assert advice.text.startswith("Keep optimizer states on the host between updates: ")
    assert advice.settings == PARKED
    assert _follows(job, advice)


def test_advice_on_micro_batches_alone() -> None:
    settings = {"parallel.max_tokens_per_microbatch": 163840} | RECOMPUTED | PARKED
    job = job_of(QWEN3_8B, settings)
    advice = _advice(job)
    assert advice.text.startswith("Use smaller micro-batches: ")
    assert list(advice.settings) == ["parallel.max_tokens_per_microbatch"]
    assert _follows(job, advice)


def test_advice_on_a_loss_that_holds_all_logits() -> None:
    settings = {
        "algorithm.loss_from": "logits",
        "parallel.max_tokens_per_microbatch": 65536,
        "parallel.expert": 8,
        "rollout.prompts_per_rollout": 128,
        "rollout.samples_per_prompt": 4,
    }
    model = QWEN3_30B | {"vocab_size": 2**18}  # or a layer's backward pass would hold more than the loss
    job = job_of(model, settings | RECOMPUTED | PARKED, num_gpus=32, gpu_bytes=62 * GB)
    advice = _advice(job)
    assert advice.settings == {"algorithm.loss_from": "hidden_states"}
    assert _follows(job, advice)


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        (
            COLOCATED | {"sglang.tp_size": 8, "sglang.mem_fraction_static": 0.95},
            {"sglang.mem_fraction_static": 0.85},
        ),
        (
            COLOCATED | {"sglang.tp_size": 1, "sglang.mem_fraction_static": 0.7},
            {"sglang.mem_fraction_static": 0.8},
        ),
        (COLOCATED | {"sglang.tp_size": 32, "sglang.mem_fraction_static": 0.7}, {"sglang.tp_size": 8}),
        (
            {"rollout.engine": "transformers"},
            {
                "rollout.engine": "sglang",
                "rollout.sglang.colocated": True,
                "rollout.sglang.weight_sync": "tensor",
                "sglang.tp_size": 8,
            },
        ),
    ],
    ids=["too large a share", "no room for a sequence", "more GPUs than there are", "embedded"],
)
def test_advice_for_an_engine_that_does_not_fit(settings: dict[str, Any], advised: dict[str, Any]) -> None:
    job = job_of(settings=SPLIT | RECOMPUTED | settings, num_gpus=16)
    assert not fits(job, memory_of(job, job.layout))
    advice = _advice(job)
    assert advice.settings == advised
    assert _follows(job, advice)


def test_an_engine_that_fits_nowhere_is_changed_before_more_gpus_are_named() -> None:
    job = job_of(settings={"rollout.engine": "transformers"})
    assert fewest_gpus(job).proposal is None
    fewest = fewest_with_other_engine(job)
    assert fewest is not None
    assert fewest.proposal is not None
    assert (fewest.num_gpus, fewest.condition) == (16, "let SGLang roll out, on the same GPUs")
    on_these = job.on(16).having(fewest.proposal.settings)
    assert fewest.proposal.settings["rollout.engine"] == "sglang"
    assert not on_these.problems
    assert has_headroom(on_these, memory_of(on_these, on_these.layout))
    assert fewest_with_other_engine(job_of()) is None


@pytest.mark.parametrize("fraction", [0.1, 0.15])
def test_an_engine_without_a_cache_gets_a_larger_share(fraction: float) -> None:
    """14.2 GiB of weights on each of four GPUs: a smaller share leaves no room for a cache."""
    engine = COLOCATED | {"sglang.tp_size": 4, "sglang.mem_fraction_static": fraction}
    job = job_of(settings=engine, num_gpus=16)
    assert "Raise sglang.mem_fraction_static or sglang.tp_size" in fewest_gpus(job).why_not
    fewest = fewest_with_other_engine(job)
    assert fewest is not None and fewest.proposal is not None
    assert fewest.condition == "raise the engine's share of the GPU"
    share = fewest.proposal.settings["sglang.mem_fraction_static"]
    assert isinstance(share, float) and share > fraction


def test_nothing_to_change_is_said_once_nothing_is_left_to_change() -> None:
    job = job_of(SMALL, settings={"optimizer.offload": True}, num_gpus=1)
    offload, layout = advise(job, memory_of(job, job.layout), propose(job))
    assert offload.settings == {"optimizer.offload": False}
    assert layout.text.startswith("Keep the layout: ")
    assert _advice(job.having(offload.settings)).text.startswith("Nothing to change: ")


def test_advice_where_it_fits() -> None:
    lazy = _advice(job_of(SMALL, RECOMPUTED, num_gpus=1))
    assert "fits without recompute too" in lazy.text
    assert lazy.text.endswith(" ".join(f"--set megatron.{key}=none" for key in dict(FULL.keys())))
    assert _advice(job_of(SMALL, num_gpus=1)).text.startswith("Nothing to change")
    job = job_of(SMALL, SPLIT)
    faster = _advice(job)
    times = re.fullmatch(r"Layout 1 is estimated to be (\d\.\d\d) times as fast\.", faster.text)
    assert times
    changed = job.having(faster.settings)
    ratio = step_time(job, job.layout).total / step_time(changed, changed.layout).total
    assert float(times.group(1)) == pytest.approx(ratio, abs=0.01)


def test_advice_for_a_small_host() -> None:
    node = memory_of(job_of(SMALL, num_gpus=1), layout_of(1)).host
    without_copy = node.per_node - node.per_rank["checkpoint in flight"]
    advice = _advice(job_of(SMALL, num_gpus=1, host_bytes=without_copy + 1))
    assert advice.settings == {"checkpoint.asynchronous": False}
    assert "of a node then" in advice.text
    assert "Use more nodes" in _advice(job_of(SMALL, num_gpus=1, host_bytes=GB)).text


def test_no_change_of_options_is_said_where_other_layouts_fit() -> None:
    job = job_of(num_gpus=16)  # one expert-parallel rank holds all
    assert _advice(job).text == "No change of options makes this layout fit; take one of the layouts above."
