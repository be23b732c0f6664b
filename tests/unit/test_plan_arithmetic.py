"""The sums of the planner, against numbers worked out by hand and published ones."""

import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import Adapters, Chunk, LayerKind, chunk_tensors, padded_vocab
from megatron_dppo.config import dump_config, load_config
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.engines.embedded.sampling import draw, most_probable, sampling_log_probs
from megatron_dppo.errors import ConfigError
from megatron_dppo.kernels.output_layer import CHUNK_BYTES, OutputLayer
from megatron_dppo.kernels.shards import VocabShard
from megatron_dppo.plan.activations import Assumptions, LayerModel, LayerTokens, kept_by_layers
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import (
    FULL,
    LayerOptions,
    Recompute,
    recompute_of,
)
from megatron_dppo.plan.memory import engine_memory, memory_of
from megatron_dppo.plan.stages import (
    LossTokens,
    chunk_tokens,
    chunks_in_flight,
    chunks_of,
    loss_bytes,
    optimizer_bytes,
    partition,
    rank_states,
    stage_parts,
)
from megatron_dppo.plan.units import GIB, as_overrides, parse_bytes, with_settings
from tests.support.plan_models import (
    COLOCATED,
    GB,
    LLAMA3_8B,
    QWEN3_06B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN25_7B,
    job_of,
    layout_of,
    shape_of,
)
from tests.support.refusals import refused

MOE = LayerKind(is_moe=True, is_linear=False)


@pytest.mark.parametrize(
    ("content", "total"),
    [
        (QWEN3_30B, 30_532_122_624),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_06B, 596_049_920),
        (QWEN25_7B, 7_615_616_512),
        (LLAMA3_8B, 8_030_261_248),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_parameters_equal_the_published_numbers(content: dict[str, Any], total: int) -> None:
    assert shape_of(content).num_parameters == total


def test_active_parameters() -> None:
    assert shape_of(QWEN3_30B).num_active_parameters == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768
    assert shape_of(QWEN3_8B).num_active_parameters == shape_of(QWEN3_8B).num_parameters


def test_an_unknown_architecture_is_refused() -> None:
    with refused("model.load", "GPT2LMHeadModel"):
        shape_of(QWEN3_8B | {"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 4, "expert_tensor": 4},
        {"pipeline": 4},
        {"pipeline": 4, "virtual_pipeline": 3},
        {"expert": 8},
        {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 1},
    ],
)
def test_ranks_together_hold_the_model_once(sizes: dict[str, int]) -> None:
    """Over one copy of the model: split tensors add up, replicated ones (norms, routers) come once per rank."""
    shape = shape_of(QWEN3_30B)
    tensor, expert = sizes.get("tensor", 1), sizes.get("expert", 1)
    layout = layout_of(8, **sizes)
    split = replicated = 0
    for part in partition(shape, layout, True):
        for tensors in (chunk_tensors(shape, layout, chunk) for chunk in part.chunks):
            experts = sum(t.numel for t in tensors if ".experts." in t.name)
            copied = sum(t.numel for t in tensors if "norm" in t.name or ".router." in t.name)
            split += experts * expert * layout.expert_tensor
            split += (sum(t.numel for t in tensors) - experts - copied) * tensor
            replicated += copied
    assert split + replicated == shape.num_parameters


def test_the_vocabulary_is_padded_to_the_tensor_size() -> None:
    shape = shape_of(QWEN3_30B | {"vocab_size": 101})
    assert padded_vocab(shape, layout_of(4, tensor=4)) == 104
    assert chunk_tensors(shape, layout_of(4, tensor=4), Chunk.whole(shape))[0].shape == (26, 2048)


def test_both_ends_of_a_pipeline_have_tied_embeddings() -> None:
    shape = shape_of(QWEN3_06B)
    one = sum(part.dense.own for part in partition(shape, layout_of(1), True))
    two = sum(part.dense.own for part in partition(shape, layout_of(2, pipeline=2), True))
    assert two - one == 151936 * 1024


def test_chunks_of_an_interleaved_pipeline() -> None:
    layout = layout_of(2, pipeline=2, virtual_pipeline=2)
    stages = [chunks_of(stage, layout, 8) for stage in range(2)]
    assert [[list(chunk.layers) for chunk in chunks] for chunks in stages] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    assert [[(chunk.is_first, chunk.is_last) for chunk in chunks] for chunks in stages] == [
        [(True, False), (False, False)],
        [(False, False), (False, True)],
    ]


def test_stages_with_other_layers_hold_other_tensors() -> None:
    """Dense layers come first here, so that stages between the ends differ too."""
    shape = shape_of(QWEN3_30B | {"mlp_only_layers": [0, 1, 2, 12]})
    owns = [part.dense.own + part.expert.own for part in partition(shape, layout_of(4, pipeline=4), True)]
    experts, dense = 128 * 3 * 768 * 2048 + 128 * 2048, 3 * 6144 * 2048  # the router is of the MoE layers'
    assert owns[2] - owns[1] == experts - dense
    assert [part.stage for part in partition(shape, layout_of(4, pipeline=4), True)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("stage", "pipeline", "virtual", "num_microbatches", "expected"),
    [
        (0, 1, 1, 8, 1),
        (0, 4, 1, 8, 4),
        (3, 4, 1, 8, 1),
        (0, 4, 1, 2, 2),
        (0, 4, 2, 8, 6 + 4 + 1),
        (3, 4, 2, 8, 4 + 1),
        (0, 4, 2, 2, 4),
    ],
)
def test_micro_batches_in_flight(
    stage: int, pipeline: int, virtual: int, num_microbatches: int, expected: int
) -> None:
    layout = layout_of(pipeline, pipeline=pipeline, virtual_pipeline=virtual)
    assert chunks_in_flight(stage, layout, num_microbatches) == expected


def test_elements_of_buffers_and_shards() -> None:
    shape = shape_of(QWEN3_30B)
    layout = layout_of(16, expert=4)
    (part,) = partition(shape, layout, True)
    experts = 48 * 32 * 3 * 768 * 2048
    assert (part.expert.own, part.expert.sharers) == (experts, 4)
    assert part.expert.shard == experts // 4
    assert (part.dense.own, part.dense.sharers) == (shape.num_parameters - 4 * experts, 16)
    assert 0 <= part.dense.buffer - part.dense.own < 48 * 8 * 64 + 128
    assert part.dense.shard * 16 == part.dense.buffer
    (plain,) = partition(shape, layout, False)
    assert plain.dense.shard == plain.dense.buffer == plain.dense.own


def test_adapters_train_next_to_frozen_weights() -> None:
    """Of TP2 EP2, a rank's factors of rank 8: q, k, v and the gates split B, o and down split A."""
    shape, layout = shape_of(QWEN3_30B), layout_of(4, tensor=2, expert=2, expert_tensor=1)
    linears = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    (whole,) = partition(shape, layout, True)
    (part,) = partition(shape, layout, True, Adapters(8, linears))
    hidden, heads, groups, width = 2048, 4096, 512, 768
    attention = 3 * hidden + (heads + 2 * groups) // 2 + heads // 2 + hidden
    assert part.dense.own == 48 * 8 * attention
    assert part.expert.own == 48 * 64 * 8 * 3 * (hidden + width)
    assert part.frozen == whole.dense.own + whole.expert.own
    assert part.weights == part.buffer + part.frozen
    assert (part.largest, part.largest_trained) == (whole.largest, 64 * 8 * hidden)
    (some,) = partition(shape, layout, False, Adapters(16, ("o_proj",)))
    assert (some.buffer, some.expert.own) == (48 * 16 * (heads // 2 + hidden), 0)
    job = job_of(QWEN3_30B, {"lora.rank": 8})
    (of_job,) = stage_parts(job, layout)
    states = rank_states(job, of_job)
    assert of_job == part
    assert (states.parameters, states.gradients) == (2 * part.weights, 4 * part.buffer)
    assert (states.optimizer, states.largest_gradient) == (12 * part.shard, 2 * part.largest_trained)


def test_a_split_of_experts_leaves_unsplit_ones_with_the_dense_parameters() -> None:
    (part,) = partition(shape_of(QWEN3_30B), layout_of(8), True)
    assert part.expert.own == 0
    assert part.dense.own == 30_532_122_624


@pytest.mark.parametrize(("dtype_bytes", "expected"), [(2, 12), (4, 8)])
def test_bytes_of_adam(dtype_bytes: int, expected: int) -> None:
    assert optimizer_bytes(1, dtype_bytes) == expected


def _layer(layout: Layout, spec: Any = "torch", tokens: int = 8192, **sizes: Any) -> LayerModel:
    shape = shape_of(QWEN3_30B | sizes)
    return LayerModel(shape, layout, LayerTokens.of(tokens, layout), 2, spec, Assumptions(1.0, 1.0))


def test_tensor_and_context_parallelism_divide_activations() -> None:
    whole = _layer(layout_of(1)).layer(MOE)
    split = _layer(layout_of(2, tensor=2)).layer(MOE)
    assert split == pytest.approx(whole / 2, rel=0.01)
    queries = 8192 * 8 * 128 * 2  # of one group of heads: a view of qkv
    split = _layer(layout_of(4, tensor=4)).layer(MOE)
    assert split == pytest.approx(whole / 4 - queries, rel=0.01)
    # Of two ranks, each keeps five halves of its share of keys and of values; one alone keeps its keys, and as
    # values a view of what norms keep anyway.
    keys = 4 * 8192 * 4 * 128 * 2
    assert _layer(layout_of(2, context=2)).layer(MOE) == pytest.approx((whole + keys) / 2, rel=1e-3)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_half_precision_on_a_gpu_attends_without_padding(context: int) -> None:
    layer = _layer(layout_of(context, context=context))
    padding = Assumptions(1.0, attention_padding=2.0)
    assert replace(layer, assumptions=padding).layer(MOE) == layer.layer(MOE)
    assert not layer.is_flash or replace(layer, dtype_bytes=4).core_attention() > 2 * layer.core_attention()
    exact, float32 = layer.attended_keys, replace(layer, dtype_bytes=4, assumptions=padding)
    assert exact == 8192 * {1: 1, 2: 5 / 4, 4: 9 / 8}[context]
    assert float32.core_attention() == 2 * replace(layer, dtype_bytes=4).core_attention()


def test_specs_are_ordered() -> None:
    for_cpu, ours, engine = (_layer(layout_of(1), spec).layer(MOE) for spec in ("torch-cpu", "torch", "te"))
    assert for_cpu > ours > engine


def test_recompute_keeps_less() -> None:
    model, layers = _layer(layout_of(1)), range(48)
    one, shared = model.layer(MOE), model.shared()
    none, full = (kept_by_layers(model, layers, Recompute(kind)) for kind in ("none", "full"))
    assert (none.held, none.again) == (shared + 48 * one, 0)
    assert (full.held, full.again) == (shared + 48 * 8192 * 2048 * 2, one)
    pairs = kept_by_layers(model, layers, replace(FULL, num_layers=2))
    assert (pairs.held, pairs.again) == (shared + 24 * 8192 * 2048 * 2, 2 * one)
    some = kept_by_layers(model, layers, Recompute("full", "block", 40))
    assert (some.held, some.again) == (shared + 40 * 8192 * 2048 * 2 + 8 * one, 0)
    experts = kept_by_layers(model, layers, Recompute("selective", modules=("moe",)))
    assert none.held - experts.held == 48 * model.experts()
    assert experts.again == model.experts()
    attention = kept_by_layers(model, layers, Recompute("selective"))
    assert attention.held < none.held
    unknown = kept_by_layers(model, layers, Recompute("selective", modules=("layernorm",)))
    assert unknown == none


def test_experts_get_every_token_top_k_times() -> None:
    model = _layer(layout_of(8, expert=8))
    assert model.expert_rows() == 8192 * 8
    assert replace(model, assumptions=Assumptions(1.5, 1.0)).expert_rows() == 8192 * 12
    assert _layer(layout_of(8, tensor=4, expert=2)).expert_rows() == 8192 * 2
    assert _layer(layout_of(8, tensor=4, expert=2, expert_tensor=4)).expert_rows() == 8192 * 8


def _loss(num_tokens: int = 4096, topk: int = 0, **options: Any) -> int:
    """Of Qwen3-30B-A3B in bfloat16, its vocabulary split in four."""
    tokens = LossTokens(num_tokens, dtype_bytes=2, topk_columns=topk)
    algorithm = AlgorithmConfig.model_validate(options)
    return loss_bytes(shape_of(QWEN3_30B), layout_of(4, tensor=4), algorithm, tokens)


COLUMNS = 151936 // 4
STATES, WEIGHT = 4096 * 2048 * 2, COLUMNS * 2048  # bytes of [T, H], elements of [V/4, H]
GRADIENTS = STATES + 4096 * 11 * 4  # by hidden states, of 4096 tokens, with the loss's results
BESIDE = 2 * 2048 * 2 + 4 * 4 * 4  # per token of a chunk, besides logits: hidden states, statistics of 4 shards


def test_the_loss_from_hidden_states_holds_one_chunk_and_the_gradients() -> None:
    """Bytes for 4000 tokens make chunks of 3968, a multiple of 128."""
    chunked = _loss(8192, logits_chunk_bytes=4000 * COLUMNS * 2)
    assert chunked == GRADIENTS + STATES + 4096 * 11 * 4 + 3968 * (COLUMNS * 2 + BESIDE) + 2 * STATES


@pytest.mark.parametrize("logits_dtype", ["model", "float32"])
@pytest.mark.parametrize("megabytes", [0.01, 1, 100, 512])
def test_chunks_are_as_large_as_in_the_loss(logits_dtype: str, megabytes: float) -> None:
    budget = int(megabytes * 2**20)
    options = AlgorithmConfig.model_validate({"logits_chunk_bytes": budget, "logits_dtype": logits_dtype})
    dtype = torch.float32 if logits_dtype == "float32" else None
    layer = OutputLayer(VocabShard(0, COLUMNS), chunk_bytes=budget, logits_dtype=dtype)
    weight = torch.empty(COLUMNS, 4, dtype=torch.bfloat16, device="meta")
    assert chunk_tokens(options, COLUMNS, dtype_bytes=2) == layer.chunk_tokens(weight)
    assert AlgorithmConfig().logits_chunk_bytes == CHUNK_BYTES


def test_a_chunk_has_no_more_than_all_tokens() -> None:
    whole = _loss(logits_chunk_bytes=2**40)
    assert whole == GRADIENTS + 4096 * (COLUMNS * 2 + BESIDE) + STATES
    wide = _loss(logits_chunk_bytes=2**40, logits_dtype="float32")
    assert wide - whole == 4096 * COLUMNS * 4  # twice as large, and the gradient in bfloat16 as well


def test_the_smallest_chunks_leave_the_start_of_backward_as_the_peak() -> None:
    """Then there are a rank's part of the gradient by hidden states, and one of the weight for autograd."""
    assert _loss(logits_chunk_bytes=1) == GRADIENTS + STATES // 4 + WEIGHT * 2


def test_the_loss_from_logits_holds_all_of_them_and_the_gradients_of_the_output_layer() -> None:
    logits, of_layer = 4096 * COLUMNS * 2, 2 * STATES + WEIGHT * 2
    assert _loss(loss_from="logits") == logits + 4096 * 11 * 4 + of_layer
    assert _loss(loss_from="logits", topk=20) == logits + 4096 * 31 * 4 + of_layer


def test_the_default_loss_takes_a_fraction_of_all_logits() -> None:
    assert _loss(32768) < _loss(32768, loss_from="logits") / 2


@pytest.mark.parametrize(("shares", "distinct"), [(False, 0), (True, 4 * (808 + 2 * 8192))])
def test_the_batch_carries_routes_and_top_k(shares: bool, distinct: int) -> None:
    """With shared prompts the distinct tokens too, in pairs of samples."""
    settings = {
        "parallel.share_prefixes": shares,
        "rollout.routing_replay": "replay",
        "rollout.num_topk_log_probs": 20,
        "rollout.prompts_per_rollout": 8,
        "rollout.samples_per_prompt": 8,
        "algorithm.minibatches_per_rollout": 1,
        "data.max_prompt_tokens": 808,
        "rollout.max_response_tokens": 8192,
        "parallel.max_tokens_per_microbatch": 18000,
    }
    memory = memory_of(job_of(QWEN3_30B, settings), layout_of(8, expert=8))
    loss = memory.worst.moments["loss"]
    assert (memory.num_microbatches, memory.microbatch_tokens) == (4, 18000)
    tokens = 8 * 9000 + distinct
    assert loss["top-K"] == tokens * 20 * 8
    assert loss["routes"] == tokens * 48 * 8 + 18000 * 48 * 8 * 8  # uint8 of a step, int64 of a micro-batch
    assert loss["batch"] == tokens * 41


SHORT = {
    "rollout.prompts_per_rollout": 8,
    "rollout.samples_per_prompt": 16,
    "algorithm.minibatches_per_rollout": 1,
    "data.max_prompt_tokens": 600,
    "rollout.max_response_tokens": 100,
    "parallel.max_tokens_per_microbatch": 2600,
}


@pytest.mark.parametrize(
    ("changes", "num_gpus", "num_samples", "num_microbatches", "num_tokens"),
    [
        ({}, 1, 16, 8, 2200),  # one tree to a micro-batch
        ({"parallel.max_tokens_per_microbatch": 4400}, 1, 16, 4, 4400),
        ({"parallel.max_tokens_per_microbatch": 1400}, 1, 8, 16, 1400),  # half of one
        ({"parallel.max_tokens_per_microbatch": 1399}, 1, 7, 19, 1300),
        ({"parallel.max_tokens_per_microbatch": 700}, 1, 1, 128, 700),
        ({}, 64, 2, 1, 800),  # two samples on each data-parallel rank
        ({"parallel.share_prefixes": True}, 1, 16, 8, 2200),
        ({"parallel.share_prefixes": False}, 1, 1, 43, 2100),
        ({"parallel.context": 2}, 1, 1, 43, 2100),
        ({"model.layer_spec": "transformer_engine"}, 1, 1, 43, 2100),
    ],
)
def test_a_shared_prompt_counts_once_in_each_micro_batch(
    changes: dict[str, Any], num_gpus: int, num_samples: int, num_microbatches: int, num_tokens: int
) -> None:
    work = job_of(QWEN3_8B, SHORT | changes).workload
    tree = work.tree(num_gpus)
    assert (tree.num_samples, work.num_microbatches(num_gpus)) == (num_samples, num_microbatches)
    of_sample = 600 / num_samples + 100
    assert work.forwarded_tokens(num_gpus) == pytest.approx(work.samples(num_gpus) * of_sample)
    assert num_tokens <= work.microbatch_tokens(num_gpus) <= work.max_tokens
    of_response = 100 if num_samples > 1 else 700
    assert work.microbatch_rows(num_gpus) == int(work.microbatch_tokens(num_gpus) * of_response / of_sample)
    assert tree.num_keys == num_samples * 700
    assert work.step_rows(num_gpus) == work.samples(num_gpus) * 700


def test_shared_prompts_save_the_time_of_all_but_the_output_layer() -> None:
    """A response of one token shares nearly all tokens; long responses share few."""
    changes = {"data.max_prompt_tokens": 1999, "rollout.max_response_tokens": 1}
    changes |= {"parallel.max_tokens_per_microbatch": 32000}
    times = [
        step_time(job_of(QWEN3_30B, SHORT | changes | {"parallel.share_prefixes": shares}), layout_of(1))
        for shares in (False, True)
    ]
    whole, shared = (each.compute for each in times)
    assert shared < whole / 4
    long = {"data.max_prompt_tokens": 1, "rollout.max_response_tokens": 1999}
    whole, shared = (
        step_time(job_of(QWEN3_30B, SHORT | changes | long | {"parallel.share_prefixes": s}), layout_of(1))
        for s in (False, True)
    )
    assert shared.compute == pytest.approx(whole.compute, rel=0.01)


def test_large_expert_counts_take_two_bytes() -> None:
    settings = {"rollout.routing_replay": "measure"}
    assert job_of(QWEN3_30B | {"num_experts": 512}, settings).workload.routes_bytes == 48 * 8 * 2
    assert job_of(QWEN3_8B, settings).workload.routes_bytes == 0


def test_engine_and_trainer_take_turns() -> None:
    settings = COLOCATED | {"sglang.tp_size": 8, "sglang.mem_fraction_static": 0.7}
    memory = memory_of(job_of(QWEN3_30B, settings), layout_of(8, expert=8))
    moments = memory.worst.moments
    assert set(moments["rollout"]) == {"engine weights", "engine cache", "reserve"}
    assert moments["rollout"]["engine weights"] + moments["rollout"]["engine cache"] == int(0.7 * 80 * GB)
    assert "engine weights" not in moments["loss"]
    assert set(moments["sync"]) == {"engine weights", "reserve"}
    assert memory.host.per_rank["trainer during rollout"] == sum(
        moments["loss"][name] for name in ("parameters", "optimizer")
    )
    # Four key-value heads over eight GPUs: each keeps one, for all layers, keys and values.
    assert memory.engine.cached_tokens == memory.engine.cache // (48 * 2 * 128 * 2)


@pytest.mark.parametrize(("hf", "saved"), [(QWEN3_30B, 0), (QWEN3_8B, 151_936 * 4096 * 2)])
def test_an_engine_may_hold_the_output_layer_of_a_tied_model(hf: dict[str, Any], saved: int) -> None:
    """SGLang builds one for Qwen3-MoE, and none for the dense Qwen3."""
    engines = [
        engine_memory(job.config, job.shape, layout_of(8), job.machine)
        for is_tied in (False, True)
        for job in [job_of(hf | {"tie_word_embeddings": is_tied}, COLOCATED)]
    ]
    assert engines[0].weights - engines[1].weights == saved


def test_a_reference_takes_host_memory_and_one_more_forward() -> None:
    layout, kl = layout_of(8, expert=8), {"algorithm.ref_kl_coef": 0.04}
    without, job = job_of(QWEN3_30B), job_of(QWEN3_30B, kl)
    memory, time, before = memory_of(job, layout), step_time(job, layout), step_time(without, layout)
    assert memory.host.per_rank["reference"] == memory.worst.moments["loss"]["parameters"]
    assert memory.peak == memory_of(without, layout).peak
    assert replace(time, reference=0.0) == before
    exchanged = 4 * memory.host.per_rank["reference"] / job.machine.rates.host_bytes_per_s / 4  # steps
    one_pass = before.compute / 3 + before.expert / 2
    assert time.reference - exchanged == pytest.approx(one_pass, rel=1e-9)
    adapters = {**kl, "lora.rank": 8}
    assert "reference" not in memory_of(job_of(QWEN3_30B, adapters), layout).host.per_rank
    other = memory_of(job_of(QWEN3_30B, {**adapters, "model.reference": Path("other")}), layout)
    assert other.host.per_rank["reference"] == other.worst.moments["loss"]["parameters"]


@pytest.mark.parametrize(
    ("settings", "is_recomputed"),
    [
        ({"algorithm.preset": "minirl"}, True),
        ({"algorithm.preset": "minirl", "algorithm.anchor": "rollout"}, False),
        ({"algorithm.preset": "dppo_binary_kl", "algorithm.anchor": "recomputed"}, True),
        ({"algorithm.preset": "my_rules:mine", "algorithm.anchor": "recomputed"}, True),
        ({"algorithm.preset": "my_rules:mine"}, False),
    ],
)
def test_a_recomputed_anchor_costs_one_more_forward(settings: dict[str, Any], is_recomputed: bool) -> None:
    layout = layout_of(8, expert=8)
    before, time = step_time(job_of(QWEN3_30B), layout), step_time(job_of(QWEN3_30B, settings), layout)
    assert replace(time, anchor=0.0) == before
    one_pass = before.compute / 3 + before.expert / 2
    assert time.anchor == (pytest.approx(one_pass, rel=1e-9) if is_recomputed else 0.0)


def test_the_embedded_engine_keeps_a_copy_of_the_model() -> None:
    job = job_of(QWEN3_8B, {"rollout.engine": "transformers", "rollout.transformers": {"weights": "float32"}})
    moments = memory_of(job, layout_of(8)).worst.moments
    assert all(moment["engine weights"] == 8_190_735_360 * 4 for moment in moments.values())
    assert {"parameters", "gradients", "optimizer", "engine cache"} <= set(moments["rollout"])
    engine = engine_memory(job.config, job.shape, layout_of(8), job.machine)
    slots = 64 // 8 * 8
    assert engine.cache == slots * (1024 + 8192) * 2 * 36 * 8 * 128 * 4


@pytest.mark.parametrize(("dtype", "top_p"), [("float32", 1.0), ("bfloat16", 1.0), ("bfloat16", 0.9)])
def test_the_embedded_engine_takes_the_workspace_that_sampling_takes(dtype: str, top_p: float) -> None:
    settings = {"rollout.engine": "transformers", "rollout.transformers": {"weights": dtype}}
    settings["rollout.top_p"] = top_p
    job = job_of(QWEN3_8B, settings)
    engine = engine_memory(job.config, job.shape, layout_of(8), job.machine)
    logits = torch.randn(4, 20_000, dtype=getattr(torch, dtype))
    noise = torch.rand(4, dtype=torch.float64)
    with profile(profile_memory=True) as profiled:
        log_probs = sampling_log_probs(logits, 0.7, top_p)
        draw(log_probs, noise)
        most_probable(log_probs, 20)
    found = peak_bytes(profiled) + logits.nbytes
    slots = 64 // 8 * 8
    planned = engine.workspace * logits.numel() / (slots * job.shape.sizes.vocab_size)
    assert found <= planned <= 1.02 * found


def peak_bytes(profiled: Any) -> int:
    """The most bytes that were allocated at once under a profiler."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(("key", "value"), [("tp_size", 0), ("tp_size", 1.5), ("mem_fraction_static", "much")])
def test_options_of_sglang_that_make_no_sense_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"sglang.{key}"):
        memory_of(job_of(QWEN3_30B, COLOCATED | {f"sglang.{key}": value}), layout_of(8))


def test_optimizer_states_on_the_host_are_on_the_gpu_in_the_step() -> None:
    layout = layout_of(8, expert=8)
    plain = memory_of(job_of(), layout)
    moved = memory_of(job_of(settings={"optimizer.offload": True}), layout)
    states = plain.worst.moments["loss"]["optimizer"]
    assert not any(
        "optimizer" in moved.worst.moments[moment] for moment in ("loss", "backward", "rollout", "sync")
    )
    assert moved.worst.moments["step"] == plain.worst.moments["step"]
    assert moved.worst.moments["step"]["optimizer"] == states // 12 * 16  # and AdamW's temporaries
    assert moved.host.per_rank["optimizer"] == states
    assert "optimizer" not in plain.host.per_rank


def test_the_worst_stage_of_a_pipeline_has_the_logits_or_the_most_in_flight() -> None:
    memory = memory_of(job_of(), layout_of(8, pipeline=4, expert=2))
    assert [("logits" in stage.moments["loss"]) for stage in memory.stages] == [False, False, False, True]
    held = [stage.moments["loss"]["activations"] for stage in memory.stages]
    assert held == sorted(held, reverse=True)
    assert memory.peak == max(stage.peak for stage in memory.stages)


@pytest.mark.parametrize(
    ("table", "where"),
    [
        ({"recompute_granularity": "some"}, "recompute_granularity"),
        ({"recompute_granularity": "none"}, "recompute_granularity"),
        (FULL.keys() | {"recompute_method": "blok"}, "recompute_method"),
        ({"recompute_num_layers": "2"}, "recompute_num_layers"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, "recompute_method"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "recompute_num_layers"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "recompute_num_layers"),
        ({"recompute_granularity": "selective", "recompute_modules": "moe"}, "recompute_modules"),
    ],
)
def test_recompute_keys_that_megatron_refuses_are_refused(table: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=f"megatron.{where}"):
        recompute_of(table)


def test_recompute_keys_go_there_and_back() -> None:
    for recompute in (Recompute(), FULL, Recompute("selective", modules=("moe", "mlp"))):
        assert recompute_of(recompute.keys()) == recompute


@pytest.mark.parametrize(
    ("layer_spec", "counted"), [("auto", "torch"), ("torch", "torch"), ("transformer_engine", "te")]
)
def test_the_layer_spec_is_the_configured_one_or_the_one_that_keeps_more(layer_spec: str, counted: str) -> None:
    assert LayerOptions.of(job_of(settings={"model.layer_spec": layer_spec}).config).layer_spec == counted


def test_settings_reach_sections_of_sections_and_pass_through_tables(tmp_path: Path) -> None:
    config = job_of(settings={"sglang.tp_size": 4}).config
    settings = {
        "parallel.tensor": 2,
        "rollout.sglang.colocated": True,
        "sglang.tp_size": 8,
        "megatron.recompute_modules": ["core_attn", "moe"],
        "rollout.engine": "transformers",
    }
    changed = with_settings(config, settings)
    assert (changed.parallel.tensor, config.parallel.tensor) == (2, 1)
    assert (changed.rollout.sglang.colocated, changed.rollout.max_response_tokens) == (True, 8192)
    assert (changed.sglang, config.sglang) == ({"tp_size": 8}, {"tp_size": 4})
    file = tmp_path / "base.toml"
    file.write_text(dump_config(config))
    overrides = shlex.split(as_overrides(settings))
    assert set(overrides[::2]) == {"--set"}
    assert load_config([file], overrides[1::2]) == changed


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GB", 80 * GB), ("79.6 GiB", int(79.6 * GIB)), ("1tb", 10**12), ("512MiB", GIB // 2)],
)
def test_sizes_with_units_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text, "--gpu-memory") == expected


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "0GB", "80 gigabytes", "nanGB", "1e3GB", ""])
def test_other_sizes_are_refused(text: str) -> None:
    with refused("--gpu-memory"):
        parse_bytes(text, "--gpu-memory")


def test_planning_needs_neither_megatron_nor_sglang() -> None:
    code = "import sys, megatron_dppo.plan; sys.exit(bool({'megatron', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
