"""A router's expert bias: float32 in a bfloat16 model, frozen unless a setting moves it, resumed as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.tiny import random_groups
from tests.support.tiny_families import write_family

RATE = 0.001
MOVED = {"moe_router_bias_update_rate": RATE}
RATES: dict[str, dict[str, Any]] = {"frozen": {}, "moved": MOVED}
CLIPS = (1.0, 0.0)


def measure(runtime: Runtime, folder: str) -> dict[str, dict[str, dict[str, Tensor]]]:
    """Biases before and after a gradient step, and of an actor that loads what was saved then."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.checkpoints.megatron_folder import load_model_states, load_sharded, model_states
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from tests.support.saving import save_sharded

    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, megatron in RATES.items():
        config = Config.model_validate(
            {
                "model": {"load": f"{folder}/model", "dtype": "bfloat16"},
                "parallel": {"max_tokens_per_microbatch": 60},
                "optimizer": {"distributed": False},
                "megatron": megatron,
            }
        )
        actor = Actor(config, runtime)
        before = biases_of(actor)
        groups = with_advantages(random_groups(6, routing=actor.routing), normalize_std=False)
        own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
        shape = BatchShape("token_mean", 16, 60, routing=actor.routing)
        (batch,), _ = train_batches([own], shape, actor.data_parallel)
        actor.train_step(batch, is_first=True)
        saved = Path(folder, f"saved {name}")
        runtime.on_main(saved.mkdir)
        save_sharded(model_states(actor.chunks), saved)
        other = Actor(config, runtime)
        load_model_states(other.chunks, load_sharded(model_states(other.chunks), saved))
        found[name] = {"before": before, "after": biases_of(actor), "resumed": biases_of(other)}
    return found


def overflow(runtime: Runtime, folder: str) -> list[dict[str, Any]]:
    """Two steps of each clip: one that moves the weights, and one whose gradients are huge, but finite."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    found: list[dict[str, Any]] = []
    for clip in CLIPS:
        config = Config.model_validate(
            {
                "model": {"load": f"{folder}/model", "dtype": "bfloat16" if clip else "float32"},
                "optimizer": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": clip, "distributed": bool(clip)},
                "megatron": MOVED,
            }
        )
        actor = Actor(config, runtime)
        groups = with_advantages(random_groups(6, routing=actor.routing), normalize_std=False)
        own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
        huge = [replace(sample, advantage=1e25 * (sample.advantage or 0.0)) for sample in own]
        shape = BatchShape("token_mean", 16, 60, routing=actor.routing)
        weights: list[dict[str, Tensor]] = []
        for samples in (own, huge):
            (batch,), _ = train_batches([samples], shape, actor.data_parallel)
            step = actor.train_step(batch, is_first=True)
            weights.append({name: tensor.clone() for name, tensor in actor.weights()})
        kept = all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
        metrics = step.metrics.values()
        found.append({"kept": kept, "faults": step.faults, "skipped": metrics["optimizer/skipped_steps"]})
    return found


def biases_of(actor: Any) -> dict[str, Tensor]:
    """As weight sync and export give them."""
    return {name: tensor.clone() for name, tensor in actor.weights() if stays_float32(name)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bias")
    for name in ("model", "other"):
        write_family(folder / name, "Glm4MoeForCausalLM")
    write_family(folder / "four layers", "Glm4MoeForCausalLM", num_hidden_layers=4)
    file = folder / "other" / "model.safetensors"
    save_file({name: tensor.roll(1, 0).contiguous() for name, tensor in load_file(file).items()}, file)
    return folder


@pytest.fixture(scope="module")
def measured(model: Path) -> list[dict[str, dict[str, dict[str, Tensor]]]]:
    return run_ranks(measure, 2, model, str(model))


def test_expert_bias_is_not_rounded_to_bfloat16(model: Path, measured: list[dict[str, Any]]) -> None:
    stored = HFWeights(model / "model")
    for of_rank in measured:
        for name, bias in of_rank["frozen"]["before"].items():
            assert bias.dtype == torch.float32
            assert torch.equal(bias, stored.tensor(name)) and not torch.equal(bias, bias.bfloat16().float())


def test_expert_bias_is_frozen_by_default(measured: list[dict[str, Any]]) -> None:
    for of_rank in measured:
        for name, before in of_rank["frozen"]["before"].items():
            assert torch.equal(of_rank["frozen"]["after"][name], before)
            steps = (of_rank["moved"]["after"][name] - before) / RATE
            assert torch.allclose(steps.abs().round(), steps.abs(), atol=1e-3) and steps.abs().max() <= 1.001
            assert steps.min() < 0 < steps.max(), "experts with more tokens than the mean go down, others up"


def test_expert_bias_is_equal_on_all_ranks_and_after_a_resume(measured: list[dict[str, Any]]) -> None:
    for name, bias in measured[0]["moved"]["after"].items():
        assert torch.equal(bias, measured[1]["moved"]["after"][name])
        for of_rank in measured:
            assert torch.equal(of_rank["moved"]["resumed"][name], bias)


def test_overflowing_gradient_norm_skips_the_step_and_changes_no_weight(model: Path) -> None:
    for of_rank in run_ranks(overflow, 2, model, str(model)):
        for step in of_rank:
            assert step["kept"] and step["skipped"] == 1
            assert step["faults"] == ("gradient: the norm is inf, though each gradient is finite",)


FAR = 0.3
"""A rate of biases with which they change the experts after one step."""
TABLES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one process": (1, {}),
    "bfloat16, two ranks of data": (2, {"model": {"dtype": "bfloat16"}}),
    "adapters": (1, {"lora": {"rank": 4, "alpha": 8}}),
    "stages of two chunks": (
        2,
        {"model": {"load": "four layers"}, "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    ),
    "another reference": (1, {"model": {"reference": "other"}}),
    "adapters, another reference": (1, {"lora": {"rank": 4, "alpha": 8}, "model": {"reference": "other"}}),
    "offloaded between steps": (1, {"optimizer": {"offload": True}}),
}


def reference(runtime: Runtime, folder: str, tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Log-probs of the reference's own weights, and what the reference policy finds after biases have moved."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.actor.reference import ReferencePolicy
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    common: dict[str, dict[str, Any]] = {
        "model": {"load": "model", "dtype": "float32"},
        "parallel": {"max_tokens_per_microbatch": 60},
        "optimizer": {"lr": 1e-2},
        "megatron": {"moe_router_bias_update_rate": FAR},
    }
    merged = {name: common.get(name, {}) | tables.get(name, {}) for name in common | tables}
    merged["model"] |= {
        key: f"{folder}/{merged['model'][key]}" for key in {"load", "reference"} & merged["model"].keys()
    }
    config = Config.model_validate(merged)

    def log_probs(microbatches: Any, column: Any) -> Tensor:
        return torch.cat([values[m.loss_mask] for m, values in zip(microbatches, column, strict=True)])

    actor = Actor(config, runtime)
    groups = with_advantages(random_groups(6, routing=actor.routing), normalize_std=False)
    data = actor.data_parallel
    own = [sample for group in groups[data.group :: data.num_groups] for sample in group.samples]
    own = own if runtime.rank in (ranks := data.ranks_of(data.group))[:1] or len(ranks) == 1 else []
    (batch,), _ = train_batches([own], BatchShape("token_mean", 16, 60, routing=actor.routing), data)
    expected = log_probs(batch.microbatches, actor.forward_log_probs(batch.microbatches, False))
    if config.model.reference is not None:
        of_other = Config.model_validate(
            {name: table for name, table in merged.items() if name != "lora"}
            | {"model": {"load": merged["model"]["reference"], "dtype": "float32"}}
        )
        other = Actor(of_other, runtime)
        expected = log_probs(batch.microbatches, other.forward_log_probs(batch.microbatches, False))
    began = state_of(actor)
    policy = ReferencePolicy(actor, config)
    changed_at_start = [
        name for name, tensor in state_of(actor).items() if not torch.equal(tensor, began[name])
    ]
    actor.train_step(batch, is_first=False)  # a second step would move the biases back
    before = state_of(actor)
    moved = actor.forward_log_probs(batch.microbatches, False)
    (of_step,) = policy.with_log_probs([batch])
    again = actor.forward_log_probs(batch.microbatches, False)
    moves = [
        float((tensor - began[name]).abs().max())
        for name, tensor in before.items()
        if name.endswith("expert_bias")
    ]
    return {
        "expected": expected,
        "found": log_probs(of_step.microbatches, [m.ref_log_probs for m in of_step.microbatches]),
        "moved": log_probs(batch.microbatches, moved),
        "again": log_probs(batch.microbatches, again),
        "changed": [name for name, tensor in state_of(actor).items() if not torch.equal(tensor, before[name])],
        "changed at start": changed_at_start,
        "moves": moves,
    }


def state_of(actor: Any) -> dict[str, Tensor]:
    """All parameters and buffers of this rank."""
    return {
        f"{number}.{name}": tensor.clone()
        for number, chunk in enumerate(actor.chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
    }


@pytest.mark.parametrize("name", TABLES)
def test_the_reference_policy_has_its_own_biases_and_the_policy_gets_its_own_back(
    name: str, model: Path, tmp_path: Path
) -> None:
    """Bit for bit, after biases have moved so far that other experts are chosen."""
    num_ranks, tables = TABLES[name]
    for of_rank in run_ranks(reference, num_ranks, tmp_path, str(model), tables):
        assert torch.equal(of_rank["found"], of_rank["expected"])
        assert torch.equal(of_rank["again"], of_rank["moved"])
        assert of_rank["changed"] == of_rank["changed at start"] == []
        assert (of_rank["moved"] - of_rank["expected"]).abs().max() > 0.05
        assert of_rank["moves"] == pytest.approx([FAR] * len(of_rank["moves"]), rel=1e-3) and of_rank["moves"]
