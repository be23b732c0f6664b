"""Proposed layouts divide the model, fit, and come in a sensible order; advice works when it is followed."""

import re
from dataclasses import replace
from typing import Any

import pytest
from plan_models import GB, QWEN3_8B, QWEN3_30B, job_of, layout_of

from megatron_dppo.actor.layout import layout_problems
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.plan.advice import advise
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import NETWORK_BYTES_PER_S, NVLINK_BYTES_PER_S, Machine
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.options import FULL, Options, Recompute
from megatron_dppo.plan.search import (
    HEADROOM,
    NOT_PROVEN,
    choices,
    divides_prompts,
    divisible_layouts,
    fits,
    propose,
)


def _search(job: Job) -> Any:
    return propose(job, choices(job, is_recompute_given=False))


def test_layout_py_reports_an_unproven_layout_in_the_place_that_the_search_expects() -> None:
    sizes = job_of().shape.sizes
    unproven = layout_problems(ParallelConfig(tensor=4, pipeline=2, expert=2, expert_tensor=1), 8, sizes)
    assert {problem.where for problem in unproven} <= {NOT_PROVEN}
    assert {problem.where for problem in layout_problems(ParallelConfig(tensor=3), 3, sizes)} != {NOT_PROVEN}


@pytest.mark.parametrize("content", [QWEN3_30B, QWEN3_8B], ids=["experts", "dense"])
@pytest.mark.parametrize("num_gpus", [1, 8, 12])
def test_divisible_layouts_divide(content: dict[str, Any], num_gpus: int) -> None:
    layouts = [layout for layout, _ in divisible_layouts(job_of(content, num_gpus=num_gpus))]
    assert len(set(layouts)) == len(layouts) > 0
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == num_gpus
        assert content["num_key_value_heads"] % layout.tensor == 0
        assert content["num_hidden_layers"] % (layout.pipeline * layout.virtual_pipeline) == 0
        assert content.get("num_experts", 1) % layout.expert == 0
        assert num_gpus % (layout.expert * layout.expert_tensor * layout.pipeline) == 0


def test_proposals_fit_with_room_to_spare_fastest_first_and_admitted_ones_before_others() -> None:
    job = job_of(num_gpus=16, host_bytes=2000 * GB)
    found = _search(job)
    assert found.proposals
    for proposal in found.proposals:
        assert fits(job, proposal.memory)
        assert proposal.memory.peak <= (1 - HEADROOM) * job.machine.gpu_bytes
        assert proposal.memory.host.per_node <= 2000 * GB
        assert divides_prompts(job, proposal.layout)
        assert ("optimizer offload" in proposal.missing) == proposal.options.offload_optimizer
        again = replace(job, options=proposal.options)
        assert memory_of(again, proposal.layout).peak == proposal.memory.peak
    keys = [(not p.is_admitted, p.time.total) for p in found.proposals]
    assert keys == sorted(keys)
    plain = [replace(p.layout, virtual_pipeline=1) for p in found.proposals]
    assert len(set(plain)) == len(plain)


def test_admitted_layouts_come_first() -> None:
    small = QWEN3_30B | {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1000}
    found = _search(job_of(small, num_gpus=2))
    assert [p.is_admitted for p in found.proposals] == sorted(
        (p.is_admitted for p in found.proposals), reverse=True
    )
    assert layout_of(2, expert=2) in {p.layout for p in found.proposals if p.is_admitted}


def test_layouts_that_leave_prompts_over_are_counted_and_left_out() -> None:
    job = job_of(QWEN3_8B, {"rollout.prompts_per_rollout": 4, "algorithm.minibatches_per_rollout": 4})
    found = _search(job)
    assert found.num_without_prompts > 0
    assert {proposal.layout.data for proposal in found.proposals} == {1}


def test_what_the_user_asked_for_is_not_varied() -> None:
    job = job_of(options=Options(recompute=FULL, offload_optimizer=True))
    assert choices(job, is_recompute_given=True) == (job.options,)
    assert {o.recompute.granularity for o in choices(job, is_recompute_given=False)} == {
        "none",
        "selective",
        "full",
    }
    own = Recompute("full", "block", 3)
    assert own in {o.recompute for o in choices(job_of(options=Options(own)), is_recompute_given=False)}


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


def test_recompute_and_offload_cost_time() -> None:
    layout = layout_of(8, expert=8)
    modes = [Recompute(), Recompute("selective"), Recompute("selective", modules=("core_attn", "moe")), FULL]
    times = [step_time(job_of(options=Options(mode)), layout).total for mode in modes]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    offloaded = step_time(job_of(options=Options(offload_optimizer=True)), layout)
    assert offloaded.total > times[0]
    assert offloaded.optimizer > 0


def _advice(job: Job, layout: Any) -> str:
    vary = choices(job, is_recompute_given=False)
    (sentence,) = advise(job, memory_of(job, layout), propose(job, vary), vary)
    return sentence


def test_advice_that_is_followed_makes_the_run_fit() -> None:
    layout = layout_of(8, tensor=4, expert=8)
    sentence = _advice(job_of(), layout)
    assert "--offload-optimizer" in sentence
    options = Options(FULL if "recompute" in sentence else Recompute(), offload_optimizer=True)
    tokens = re.search(r"max_tokens_per_microbatch=(\d+)", sentence)
    settings = {"parallel.max_tokens_per_microbatch": int(tokens.group(1))} if tokens else {}
    followed = job_of(settings=settings, options=options)
    assert fits(followed, memory_of(followed, layout))


def test_advice_on_micro_batches_alone() -> None:
    job = job_of(
        QWEN3_8B, {"parallel.max_tokens_per_microbatch": 81920}, options=Options(FULL, offload_optimizer=True)
    )
    sentence = _advice(job, layout_of(8))
    assert sentence.startswith("Use smaller micro-batches (--set parallel.max_tokens_per_microbatch=")


def test_advice_on_a_loss_that_holds_all_logits() -> None:
    settings = {"algorithm.loss_from": "logits", "parallel.max_tokens_per_microbatch": 65536}
    model = QWEN3_30B | {"vocab_size": 2**18}  # or a layer's backward pass would hold more than the loss
    job = job_of(model, settings, num_gpus=32, gpu_bytes=62 * GB, options=Options(FULL, True))
    sentence = _advice(job, layout_of(32, expert=8))
    assert sentence.startswith(
        "Make logits of some tokens at a time (--set algorithm.loss_from=hidden_states):"
    )


def test_advice_for_an_engine_that_takes_too_much() -> None:
    settings = {"sglang.tp_size": 8, "sglang.mem_fraction_static": 0.95}
    job = job_of(settings=settings, options=Options(FULL, True), is_engine_separate=False)
    assert "sglang.mem_fraction_static=0.85" in _advice(job, layout_of(8, tensor=4, expert=8))
    job = job_of(QWEN3_30B, {"rollout.engine": "transformers"}, options=Options(FULL, True))
    assert "rollout.engine=sglang" in _advice(job, layout_of(8, tensor=4, expert=8))


def test_an_engine_without_room_for_one_sequence_does_not_fit() -> None:
    settings = {"sglang.tp_size": 1, "sglang.mem_fraction_static": 0.7}
    job = job_of(settings=settings, options=Options(FULL, True), is_engine_separate=False)
    layout = layout_of(8, tensor=4, expert=8)
    memory = memory_of(job, layout)
    assert memory.engine.cached_tokens == 0
    assert not fits(job, memory)
    assert "sglang.tp_size=8" in _advice(job, layout)


def test_advice_when_nothing_fits() -> None:
    sentence = _advice(job_of(num_gpus=2), layout_of(2, expert=2))
    assert re.search(r"Nothing fits on 2 GPUs: use \d+ GPUs", sentence)
    sentence = _advice(job_of(num_gpus=2, gpu_bytes=4 * GB), layout_of(2, expert=2))
    assert "GPUs with more memory" in sentence


def test_advice_when_it_fits() -> None:
    small = QWEN3_30B | {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1000}
    lazy = job_of(small, num_gpus=1, options=Options(FULL))
    assert "fits without recompute too" in _advice(lazy, layout_of(1))
    assert _advice(job_of(small, num_gpus=1), layout_of(1)).startswith("Nothing to change")
    slow = _advice(job_of(small, num_gpus=8), layout_of(8, tensor=4, expert=8))
    assert re.match(r"Layout \d+ below is estimated to be \d\.\d\d times as fast", slow)


def test_advice_for_a_small_host() -> None:
    small = QWEN3_30B | {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 1000}
    node = memory_of(job_of(small, num_gpus=1), layout_of(1)).host
    without_copy = node.per_node - node.per_rank["checkpoint in flight"]
    job = job_of(small, num_gpus=1, host_bytes=without_copy + 1)
    assert "checkpoint.asynchronous=false" in _advice(job, layout_of(1))
    job = job_of(small, num_gpus=1, host_bytes=GB)
    assert "Use more nodes" in _advice(job, layout_of(1))
