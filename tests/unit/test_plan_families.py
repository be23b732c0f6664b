"""The planner on families with latent attention, sigmoid routers and shared experts, by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.architectures.parameters import LayerKind
from megatron_dppo.data.batches.balance import SampleCost
from megatron_dppo.plan.activations import Assumptions, LayerModel, LayerTokens
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.gpu_rates import GpuRates
from megatron_dppo.plan.memory import engine_memory, memory_of, passing_bytes
from megatron_dppo.plan.stages import partition
from tests.support.plan_models import COLOCATED, QWEN3_30B, job_of, layout_of, shape_of
from tests.support.published_models import DEEPSEEK_V3, GLM45_AIR, GLM47_FLASH, MOONLIGHT, PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_estimate_of_a_step_counts_the_operations_by_which_ranks_are_balanced(name: str) -> None:
    """But for routers, whose few operations only the balance counts; the balance takes samples alone."""
    job = job_of(PUBLISHED[name][0], {"parallel.share_prefixes": False})
    unit = replace(job.machine, rates=GpuRates(layer_flops_per_s=1.0, output_flops_per_s=1.0))
    job = replace(job, assumptions=Assumptions(expert_imbalance=1.0), machine=unit)
    of_sample = SampleCost.of_model(job.shape).of(job.workload.sequence_tokens)
    operations = step_time(job, layout_of(1)).compute
    assert operations == pytest.approx(of_sample * job.workload.samples(1), rel=0.02)


LATENTS, GROUPS = 27 * (512 + 64) * 2, 46 * 2 * 128 * 2  # bytes of a token: of all heads, and of one group


@pytest.mark.parametrize(
    ("content", "size", "token_bytes"),
    [(MOONLIGHT, 1, LATENTS), (MOONLIGHT, 2, LATENTS), (MOONLIGHT, 8, LATENTS), (GLM45_AIR, 8, GROUPS)],
)
def test_each_gpu_of_an_engine_caches_all_latents_or_its_groups(
    content: dict[str, Any], size: int, token_bytes: int
) -> None:
    job = job_of(content, COLOCATED | {"sglang.tp_size": size})
    engine = engine_memory(job.config, job.shape, layout_of(8, expert=8), job.machine)
    assert engine.cached_tokens == engine.cache // token_bytes


def test_the_embedded_engine_caches_keys_and_values_of_all_heads() -> None:
    settings = {"rollout.engine": "transformers", "rollout.max_response_tokens": 7168}
    job = job_of(MOONLIGHT, settings)
    engine = engine_memory(job.config, job.shape, layout_of(8), job.machine)
    assert engine.cache == 64 // 8 * 8 * (1024 + 7168) * 27 * 16 * (192 + 128) * 2


def test_a_server_of_8_bit_weights_has_the_cache_of_the_other_bytes(
    tmp_path: Path,
) -> None:
    """All but embedding, output layer, norms and routers have one byte a value."""
    form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"quantization_config": form}))
    found: list[int] = []
    for settings in ({}, {"sglang.model_path": str(tmp_path)}):
        job = job_of(QWEN3_30B, COLOCATED | {"sglang.tp_size": 4} | settings)
        found.append(engine_memory(job.config, job.shape, layout_of(8), job.machine).weights)
    quantised = 48 * (128 * 3 * 2048 * 768 + 2 * 2048 * 4096 + 2 * 2048 * 512)
    assert found[0] - found[1] == quantised // 4


@pytest.mark.parametrize(
    ("experts", "gathered"),
    [
        (8, 129_280 * 7168 * 2),  # the embedding; one expert of each rank takes less
        (64, 64 * 2 * 2048 * 7168 * 2),  # gate and up of one expert of each rank, which no bucket divides
    ],
)
def test_a_push_needs_what_is_gathered_at_a_time_twice_and_a_bucket(experts: int, gathered: int) -> None:
    job, layout = job_of(DEEPSEEK_V3, COLOCATED), layout_of(64, expert=experts)
    half = job.config.rollout.sglang.sync_bucket_bytes // 2
    assert passing_bytes(job.config, job.shape, layout, 2) == 2 * gathered + half
    assert passing_bytes(job.config, job.shape, layout_of(1), 2) == 2 * half


def test_the_embedded_engine_is_given_a_layers_experts_at_once() -> None:
    job = job_of(MOONLIGHT, {"rollout.engine": "transformers"})
    assert passing_bytes(job.config, job.shape, layout_of(8, expert=8), 2) == 2 * 64 * 2 * 1408 * 2048 * 2


@pytest.mark.parametrize(
    ("content", "stages"),
    [(MOONLIGHT, 2), (MOONLIGHT, 4), (GLM45_AIR, 4), (GLM47_FLASH, 2), (DEEPSEEK_V3, 8), (DEEPSEEK_V3, 16)],
)
def test_uneven_stages_together_hold_the_model_once(content: dict[str, Any], stages: int) -> None:
    shape, layout = shape_of(content), layout_of(stages, pipeline=stages)
    parts = partition(shape, layout, True)
    assert sum(part.dense.own + part.expert.own for part in parts) == shape.num_parameters
    layers = [layer for part in parts for chunk in part.chunks for layer in chunk.layers]
    assert layers == list(range(shape.sizes.num_layers))


def _layer(content: dict[str, Any], tokens: int = 8192, **layout: int) -> LayerModel:
    one = layout_of(8, **layout)
    return LayerModel(shape_of(content), one, LayerTokens.of(tokens, one), 2, "torch", Assumptions(1.0, 1.0))


def test_latent_attention_keeps_whole_queries_keys_and_values_as_wide_as_each_other() -> None:
    """Of Moonlight: 16 heads of 192 and values of 128, on a GPU; as wide as queries within flash attention."""
    latents = (512 + 64) * 2 + 4 + 512 * 2  # the norm's input, its statistics and its result
    inside = 4 * 16 * 192 * 2 + 16 * 4  # queries, keys, values and the result; log-sum-exp
    outside = 2048 * 2 + 4 + 2048 * 2 + 16 * 128 * 2  # the norm, its result, the output projection's input
    model = _layer(MOONLIGHT)
    assert model.attention() + model.core_attention() == 8192 * (latents + inside + outside)
    assert model.core_attention_inputs() == 8192 * 16 * (192 + 192 + 128) * 2


def test_shared_experts_keep_what_a_feed_forward_of_their_width_does() -> None:
    model = _layer(MOONLIGHT)
    shared, dense = model.dense_mlp(2 * 1408), model.layer(LayerKind(False, False))
    assert model.layer(LayerKind(True, False)) - dense == model.experts() - model.dense_mlp(11264)
    assert model.experts() - shared == model.routing() + 8192 * 6 * ((2048 + 5 * 1408) * 2 + 4)


def test_a_deep_pipeline_is_planned_stage_by_stage() -> None:
    """61 layers over 16 stages: the first has three, all dense, and the embedding; the last has two."""
    memory = memory_of(job_of(DEEPSEEK_V3, num_gpus=256), layout_of(256, pipeline=16, expert=16))
    assert len(memory.stages) == 16
    held = [stage.moments["loss"]["parameters"] for stage in memory.stages]
    assert held[0] < held[1] == held[2] > held[-1]
