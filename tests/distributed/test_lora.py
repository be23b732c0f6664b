"""LoRA equals peft: loss, each factor's gradient, the exported folder, and the merged weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.runtime.process import Runtime
from tests.support.hf_reference import Reference, backward, loss_error, relative_errors
from tests.support.ranks import run_ranks
from tests.support.roundoff import relative, require_close, worst
from tests.support.tiny import EXPERTS, LAYERS, logits_of, random_groups
from tests.support.tiny_families import write_family

EXPERT_MODULES, ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "experts and attention": {"targets": (*ATTENTION, *EXPERT_MODULES)},
    "experts": {"targets": EXPERT_MODULES, "megatron": RECOMPUTE},
    "queries, values and outputs": {"targets": ("q_proj", "v_proj", "down_proj")},
    "latent attention": {
        "architecture": "DeepseekV3ForCausalLM",
        "targets": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    },
    "no query rank": {
        "architecture": "Glm4MoeLiteForCausalLM",
        "changes": {"q_lora_rank": None},
        "targets": ("q_proj", "kv_b_proj"),
    },
    "biases and shared experts": {"architecture": "Glm4MoeForCausalLM", "targets": ATTENTION},
    "biases, sinks and windows": {"architecture": "GptOssForCausalLM", "targets": ATTENTION},
    "dense": {"architecture": "Qwen2ForCausalLM", "targets": (*ATTENTION, *EXPERT_MODULES)},
    "linear and gated attention": {
        "architecture": "Qwen3NextForCausalLM",
        "targets": (*ATTENTION, "out_proj"),
    },
    "dense, gates": {"architecture": "LlamaForCausalLM", "targets": ("k_proj", "gate_proj")},
}


def config_of(folder: Path, case: dict[str, Any], **tables: dict[str, Any]) -> Any:
    """A float32 config with the case's adapters."""
    from megatron_dppo.config.schema import Config

    return Config.model_validate(
        {
            "model": {"load": str(folder), "dtype": "float32"},
            "lora": {"rank": 8, "alpha": 24, "targets": case["targets"]},
            "parallel": {"max_tokens_per_microbatch": 60} | tables.get("parallel", {}),
            "optimizer": {"distributed": False} | tables.get("optimizer", {}),
            "megatron": case.get("megatron", {}),
        }
    )


def train_batch(actor: Any, runtime: Runtime, moe_layers: int = LAYERS) -> tuple[Any, list[Any]]:
    """This rank's share of eight groups of samples, and the samples of all."""
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    groups = with_advantages(random_groups(8, moe_layers=moe_layers, routing=actor.routing), False)
    own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
    if actor.routing is None:
        own = [replace(sample, routed_experts=None) for sample in own]
    shape = BatchShape("token_mean", 16, 60, routing=actor.routing)
    (batch,), _ = train_batches([own], shape, actor.data_parallel)
    return batch, [sample for group in groups for sample in group.samples]


def measure_all(runtime: Runtime, folder: str) -> dict[str, dict[str, Any]]:
    """Every case in one process."""
    return {case: measure(runtime, Path(folder) / case, CASES[case]) for case in CASES}


def measure(runtime: Runtime, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """An actor with random adapters, against peft with the folder that the actor wrote."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.checkpoints.convert.peft_adapter import write_adapter
    from tests.support.adapter_tensors import adapter_tensors

    config = config_of(folder, case)
    actor = Actor(config, runtime)
    before = {name: tensor.clone() for name, tensor in actor.weights()}
    base = {name: p.clone() for name, p in actor.chunks[0].named_parameters() if not p.requires_grad}
    randomize(actor)
    batch, samples = train_batch(actor, runtime)
    write_adapter(adapter_tensors(actor.chunks), config.lora, folder / "adapter", str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = {name: tensor.clone() for name, tensor in _weights(model).items()}
    model = PeftModel.from_pretrained(model, str(folder / "adapter"), is_trainable=True)
    reference, num_tokens = Reference.of(model), batch.num_loss_tokens
    logit_error = worst(reference.packed_logit_error(logits_of(actor, m), m) for m in batch.microbatches)
    loss = actor.accumulate_gradients(batch, is_first=True).metrics.state()["means"]["loss/policy"][0]
    gradients = adapter_tensors(actor.chunks, main_gradient)
    (losses, single), (exact_losses, double) = reference.compute(
        lambda each: _losses_and_gradients(each, actor.objective, samples, num_tokens)
    )
    merged, expected = dict(actor.weights()), _weights(model.merge_and_unload())
    actor.optimizer.step()
    return {
        "start": max(float((before[name] - plain[name]).abs().max()) for name in plain),
        "logit_error": logit_error,
        "loss_error": loss_error(loss, losses, exact_losses, num_tokens),
        "names": (sorted(gradients), sorted(double)),
        "errors": relative_errors(gradients, single, double),
        "merged_error": max(relative(merged[name], expected[name]) for name in expected),
        "merged_names": set(merged) == set(expected),
        "moved": [
            n for n, p in actor.chunks[0].named_parameters() if n in base and not torch.equal(p, base[n])
        ],
        "trained": sum(p.numel() for g in actor.optimizer.param_groups for p in g["params"]),
        "num_factors": sum(g.numel() for g in gradients.values()),
    }


def main_gradient(factor: Any) -> Tensor:
    """What Megatron accumulated."""
    return factor.main_grad.clone()


def randomize(actor: Any) -> None:
    """Give each B values, which start at zero; the same in every layout."""
    from megatron.core import parallel_state

    from megatron_dppo.models.lora import adapters

    for adapter in adapters(actor.chunks):
        is_expert = adapter.entry.rule.is_expert
        rank, expert_rank = parallel_state.get_tensor_model_parallel_rank(), 0
        if is_expert:
            rank = parallel_state.get_expert_tensor_parallel_rank() or 0
            expert_rank = parallel_state.get_expert_model_parallel_rank()
        for pair in adapter.pairs.values():
            shape = pair.lora_B.shape if is_expert else (1, *pair.lora_B.shape)
            first_row = rank * shape[1] if adapter.split_dim("lora_B") == 0 else 0
            expert = torch.arange(shape[0])[:, None, None] + expert_rank * shape[0]
            row = torch.arange(shape[1])[:, None] + first_row
            values = 0.1 * torch.sin(
                71.0 * expert + 7.0 * row + torch.arange(shape[2]) + (adapter.entry.layer or 0)
            )
            pair.lora_B.data.copy_(values.view_as(pair.lora_B))


def _weights(model: Any) -> dict[str, Tensor]:
    from megatron_dppo.engines.embedded.engine import checkpoint_targets

    return checkpoint_targets(model)


def _losses_and_gradients(
    model: Any, objective: Any, samples: list[Any], num_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sample's loss through peft, and each factor's gradient, under the names of an adapter folder."""
    losses = backward(model, objective, samples)
    found = {n: p.grad / num_tokens for n, p in model.named_parameters() if p.grad is not None}
    names = {n.removeprefix("base_model.model.").replace(".default.", "."): g for n, g in found.items()}
    gradients: dict[str, Tensor] = {}
    for name, gradient in names.items():
        prefix, is_expert, kind = name.partition(".mlp.experts.")
        if is_expert:
            gradients |= _of_experts(f"{prefix}{is_expert}", kind, gradient, model.peft_config["default"].r)
        else:
            gradients[name] = gradient
    return losses, gradients


def _of_experts(prefix: str, kind: str, gradient: Tensor, rank: int) -> dict[str, Tensor]:
    """Gradients of peft's stacked factors; gate and up share one, whose B has their blocks on the diagonal."""
    modules = ("gate_proj", "up_proj") if kind.startswith("base_layer.") else ("down_proj",)
    factor = kind.split(".")[-2]
    if factor == "lora_A":
        by_expert = gradient.reshape(EXPERTS, -1, gradient.shape[-1])
    else:
        by_expert = gradient.reshape(gradient.shape[0], -1, EXPERTS).permute(2, 0, 1)
    parts: dict[str, Tensor] = {}
    for expert, whole in enumerate(by_expert):
        for index, module in enumerate(modules):
            rows = whole.chunk(len(modules))[index]
            part = rows if factor == "lora_A" else rows[:, index * rank : (index + 1) * rank]
            parts[f"{prefix}{expert}.{module}.{factor}.weight"] = part
    return parts


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lora")
    for name, case in CASES.items():
        architecture = case.get("architecture", "Qwen3MoeForCausalLM")
        write_family(folder / name, architecture, **case.get("changes", {}))
    return run_ranks(measure_all, 1, folder, str(folder))[0]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient_equal_peft(measured: dict[str, dict[str, Any]], case: str) -> None:
    result = measured[case]
    assert result["start"] == 0.0, "B starts at zero"
    ours, theirs = result["names"]
    assert ours == theirs
    require_close({"logits": result["logit_error"], "loss": result["loss_error"], **result["errors"]})


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_equal_peft(measured: dict[str, dict[str, Any]], case: str) -> None:
    assert measured[case]["merged_names"]
    assert measured[case]["merged_error"] <= 1e-6


@pytest.mark.parametrize("case", CASES)
def test_only_factors_are_trained(measured: dict[str, dict[str, Any]], case: str) -> None:
    assert measured[case]["moved"] == []
    assert measured[case]["trained"] == measured[case]["num_factors"]
