"""Layouts that others publish as working fit by our arithmetic too, and say why they need what they need."""

from dataclasses import replace

import pytest
from plan_models import QWEN3_30B, job_of, layout_of
from qwen3_30b_recipes import RECIPES, Recipe

from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.options import Options, Recompute
from megatron_dppo.plan.search import fits


def _job(recipe: Recipe) -> Job:
    prompts, samples = recipe.prompts
    return job_of(
        QWEN3_30B,
        {
            "parallel.max_tokens_per_microbatch": recipe.gpu_tokens * recipe.sizes.get("context", 1),
            "rollout.engine": "sglang",
            "rollout.max_response_tokens": recipe.response_tokens,
            "rollout.prompts_per_rollout": prompts,
            "rollout.samples_per_prompt": samples,
            "rollout.routing_replay": "replay",
            "algorithm.minibatches_per_rollout": 1,
            **{f"sglang.{name}": value for name, value in (recipe.engine or {}).items()},
        },
        num_gpus=recipe.num_gpus,
        options=Options(
            recompute=recipe.recompute,
            offload_optimizer=recipe.is_offloaded,
            layer_spec=recipe.layer_spec,
            loss=recipe.loss,
        ),
        is_engine_separate=recipe.engine is None,
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.source)
def test_published_layouts_fit(recipe: Recipe) -> None:
    job = _job(recipe)
    memory = memory_of(job, layout_of(recipe.num_gpus, **recipe.sizes))
    assert fits(job, memory), (memory.worst.worst_moment, memory.worst.moments)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.source)
@pytest.mark.parametrize("without", ["offload", "recompute"])
def test_dropping_an_option_shows_what_it_is_for(recipe: Recipe, without: str) -> None:
    job, layout = _job(recipe), layout_of(recipe.num_gpus, **recipe.sizes)
    options = (
        replace(job.options, offload_optimizer=False)
        if without == "offload"
        else replace(job.options, recompute=Recompute())
    )
    memory = memory_of(replace(job, options=options), layout)
    assert fits(job, memory) == (without not in recipe.needs), memory.worst.moments
    if without in recipe.needs:
        components = memory.worst.moments[memory.worst.worst_moment]
        assert max(components, key=lambda name: components[name]) in {"optimizer", "activations", "logits"}


def test_the_optimizer_states_of_one_node_fill_its_gpus() -> None:
    """30.5 B parameters at 12 bytes are 341 GiB, more than half of what eight GPUs have."""
    job = _job(replace(RECIPES[0], is_offloaded=False))
    states = memory_of(job, layout_of(8, tensor=4, expert=8)).worst.moments["loss"]
    assert states["optimizer"] * 8 / (30_532_122_624 * 12) == pytest.approx(1.0, abs=0.01)
    assert states["parameters"] + states["gradients"] + states["optimizer"] > 0.8 * job.machine.gpu_bytes
