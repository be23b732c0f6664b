"""Layouts that others publish as working fit by our arithmetic too, and say why they need what they need.

Two things are theirs: a loss that holds all logits in float32, and in some Adam on the host, which our trainer
does not do.
"""

from dataclasses import replace

import pytest

from megatron_dppo.architectures.parameters import padded_vocab
from megatron_dppo.plan.job import FRAGMENTATION, Job
from megatron_dppo.plan.memory import Memory, StageMemory, memory_of
from megatron_dppo.plan.search import fits
from tests.support.larger_recipes import LARGER
from tests.support.plan_models import COLOCATED, RECOMPUTED, job_of, layout_of
from tests.support.qwen3_30b_recipes import RECIPES, Recipe

FLOAT = 4
recipes = pytest.mark.parametrize("recipe", (*RECIPES, *LARGER), ids=lambda recipe: recipe.source)
options = pytest.mark.parametrize("without", ["offload", "recompute"])


def _job(recipe: Recipe, loss_from: str = "logits") -> Job:
    prompts, samples = recipe.prompts
    job = job_of(
        recipe.model,
        {
            "parallel.max_tokens_per_microbatch": recipe.gpu_tokens * recipe.sizes.get("context", 1),
            "rollout.engine": "sglang",
            "rollout.max_response_tokens": recipe.response_tokens,
            "rollout.prompts_per_rollout": prompts,
            "rollout.samples_per_prompt": samples,
            "rollout.routing_replay": "replay" if recipe.has_routes else "off",
            "algorithm.minibatches_per_rollout": 1,
            "algorithm.loss_from": loss_from,
            **({} if recipe.engine is None else COLOCATED),
            **{f"sglang.{name}": value for name, value in (recipe.engine or {}).items()},
            **(RECOMPUTED if recipe.is_recomputed else {}),
            "model.layer_spec": recipe.layer_spec,
        },
        num_gpus=recipe.num_gpus,
    )
    return replace(job, machine=replace(job.machine, engine_residue_bytes=recipe.engine_residue_bytes))


def _with_our_loss(recipe: Recipe, job: Job) -> Memory:
    memory = memory_of(job, layout_of(recipe.num_gpus, **recipe.sizes))
    return _without(memory, "optimizer") if recipe.is_offloaded else memory


def _without(memory: Memory, component: str) -> Memory:
    """As if a component were not on the GPU."""
    stages: list[StageMemory] = []
    for stage in memory.stages:
        moments = {
            moment: {name: held for name, held in components.items() if name != component}
            for moment, components in stage.moments.items()
        }
        stages.append(replace(stage, moments=moments))
    return replace(memory, stages=tuple(stages))


def _with_their_loss(recipe: Recipe, job: Job) -> Memory:
    """Float32 logits, and as large tensors made of them, where ours holds them in bfloat16."""
    memory = _with_our_loss(recipe, job)
    if not recipe.float32_copies:
        return memory
    columns = padded_vocab(job.shape, memory.layout) // memory.layout.tensor
    logits = recipe.float32_copies * recipe.gpu_tokens * columns * FLOAT
    stages: list[StageMemory] = []
    for stage in memory.stages:
        loss = dict(stage.moments["loss"])
        if "logits" in loss:
            loss["logits"] = int(logits * (1 + FRAGMENTATION))
        stages.append(replace(stage, moments={**stage.moments, "loss": loss}))
    return replace(memory, stages=tuple(stages))


def _dropping(recipe: Recipe, option: str) -> Recipe:
    return replace(recipe, **{"is_offloaded" if option == "offload" else "is_recomputed": False})


@recipes
def test_published_layouts_fit(recipe: Recipe) -> None:
    job = _job(recipe)
    memory = _with_their_loss(recipe, job)
    assert fits(job, memory), (memory.worst.worst_moment, memory.worst.moments)


@recipes
@options
def test_dropping_an_option_shows_what_it_is_for(recipe: Recipe, without: str) -> None:
    lacking = _dropping(recipe, without)
    job = _job(lacking)
    memory = _with_their_loss(lacking, job)
    assert fits(job, memory) == (without not in recipe.needs), memory.worst.moments
    if without in recipe.needs:
        components = memory.worst.moments[memory.worst.worst_moment]
        assert max(components, key=lambda name: components[name]) in {"optimizer", "activations", "logits"}


@recipes
def test_published_layouts_fit_with_our_loss(recipe: Recipe) -> None:
    job = _job(recipe, "hidden_states")
    memory = _with_our_loss(recipe, job)
    assert fits(job, memory), (memory.worst.worst_moment, memory.worst.moments)


@recipes
@options
def test_our_loss_does_without_some_of_what_they_need(recipe: Recipe, without: str) -> None:
    lacking = _dropping(recipe, without)
    job = _job(lacking, "hidden_states")
    memory = _with_our_loss(lacking, job)
    is_needed = without in recipe.needs and without not in recipe.spared
    assert fits(job, memory) != is_needed, memory.worst.moments


def test_the_optimizer_states_of_one_node_fill_its_gpus() -> None:
    """30.5 B parameters at 12 bytes are 341 GiB, more than half of what eight GPUs have."""
    job = _job(replace(RECIPES[0], is_offloaded=False))
    states = memory_of(job, layout_of(8, tensor=4, expert=8)).worst.moments["loss"]
    assert states["optimizer"] * 8 / (30_532_122_624 * 12) == pytest.approx(1.0, abs=0.01)
    assert states["parameters"] + states["gradients"] + states["optimizer"] > 0.8 * job.machine.gpu_bytes
