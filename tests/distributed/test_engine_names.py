"""Megatron's Transformer Engine spec, filled and read through the weight table as our own spec is.

Transformer Engine cannot run without CUDA; names only. The modules are of Megatron's own spec, with minimal
stand-ins (engine_stand_in.py) for the classes of Transformer Engine that they derive from. What is shown:
each parameter has its rule and its place, checkpoints go both ways, R3 reaches the routers.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.megatron_options import LayerSpecName
from megatron_dppo.runtime.process import Runtime, gpu_libraries
from tests.distributed.test_checkpoint_keys import MODELS as ALL_MODELS
from tests.support.ranks import run_ranks
from tests.support.tiny import gradients_of, random_groups
from tests.support.tiny_families import write_family

ATTENTION = ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight")
EXPERTS = ("pre_mlp_layernorm.weight", "mlp.experts.linear_fc1.weight0", "mlp.experts.linear_fc2.weight3")
DENSE = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
MODELS = {name: model for name, model in ALL_MODELS.items() if name != "latent attention"}  # which is refused
NAMES = {
    "shared experts": (*ATTENTION, *EXPERTS, "mlp.shared_experts.linear_fc1.weight"),
    "experts": (*ATTENTION, *EXPERTS),
    "experts and a dense layer": (*ATTENTION, *DENSE),
    "dense": (*ATTENTION, *DENSE),
    "dense, biases, tied": (*ATTENTION, "self_attention.linear_qkv.bias", *DENSE),
}
LAYER = "decoder.layers.1."


def compare_all(
    runtime: Runtime, folder: str, names: list[str], parallel: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Each of these models in both specs."""
    from tests.distributed import engine_stand_in

    engine_stand_in.install()
    return {name: compare(runtime, Path(folder) / name, parallel) for name in names}


def compare_for_real(runtime: Runtime, folder: str, dtype: str) -> dict[str, Any]:
    """A model in both specs, with the Transformer Engine that is installed; else why none can be used."""
    if not gpu_libraries().transformer_engine.is_usable:
        return {"fault": gpu_libraries().transformer_engine.fault}
    return compare(runtime, Path(folder), {}, dtype)


def compare(runtime: Runtime, folder: Path, parallel: dict[str, int], dtype: str = "float32") -> dict[str, Any]:
    """A model in Transformer Engine's spec, against the same in ours."""
    losses, gradients, names = {}, {}, {}
    for spec in ("torch", "transformer_engine"):
        actor, loss = _loss_and_gradients(runtime, folder, parallel, spec, dtype)
        losses[spec], names[spec] = loss, [name for name, _ in actor.chunks[0].named_parameters()]
        gradients[spec] = {name: gradient.float().cpu() for name, gradient in gradients_of(actor).items()}
        del actor
    gc.collect()  # the threads of process groups end with the last reference to them
    ours, theirs = gradients["torch"], gradients["transformer_engine"]
    assert sorted(ours) == sorted(theirs)
    return {
        "losses": losses,
        "names": names["transformer_engine"],
        "errors": {n: float((theirs[n] - ours[n]).norm() / ours[n].norm().clamp(min=1e-12)) for n in ours},
        **(_checkpoints(runtime, folder) if runtime.world_size == 1 else {}),
    }


def _loss_and_gradients(
    runtime: Runtime, folder: Path, parallel: dict[str, int], spec: str, dtype: str
) -> tuple[Any, float]:
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.architectures.registry import model_sizes, read_hf_config
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    has_experts = model_sizes(read_hf_config(folder)).num_experts
    replay = "replay" if has_experts and "dense" not in folder.name else "off"
    tables = {
        "model": {"load": str(folder), "dtype": dtype, "layer_spec": spec},
        "parallel": {"max_tokens_per_microbatch": 60, **parallel},
        "optimizer": {"distributed": False},
        "rollout": {"routing_replay": replay},
    }
    actor = Actor(Config.model_validate(tables), runtime)
    groups = with_advantages(random_groups(4, routing=actor.routing), False)
    samples = [s for group in groups for s in group.samples]
    own = samples[runtime.rank :: runtime.world_size]
    routing = actor.routing if replay == "replay" else None
    shape = BatchShape("token_mean", 16, 60, routing=routing)
    (batch,), _ = train_batches([own], shape, actor.data_parallel)
    metrics = actor.accumulate_gradients(batch, is_first=True).metrics
    return actor, metrics.state()["means"]["loss/policy"][0]


def _checkpoints(runtime: Runtime, folder: Path) -> dict[str, Any]:
    """Which tensors each spec writes, and what is not the same after it was read in the other."""
    from megatron.core import dist_checkpointing

    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import family_of, read_hf_config
    from megatron_dppo.checkpoints.hf_folder import HFWeights
    from megatron_dppo.checkpoints.megatron_folder import WEIGHTS, load_weights
    from megatron_dppo.checkpoints.megatron_weights import export_hf_weights
    from megatron_dppo.mcore.groups import megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config
    from tests.support.saving import save_weights

    hf, sizes, original = read_hf_config(folder), megatron_sizes(Layout(world_size=1)), HFWeights(folder)
    stored, changed = {}, {}
    pairs: tuple[tuple[LayerSpecName, LayerSpecName], ...] = (
        ("torch", "transformer_engine"),
        ("transformer_engine", "torch"),
    )
    for spec, other in pairs:
        out = folder.with_name(f"{folder.name} by {spec}")
        writer, reader = (
            build_model(hf, transformer_config(hf, torch.float32, sizes, {}, each), each)
            for each in (spec, other)
        )
        load_weights(writer, folder, hf)
        save_weights(writer, out, folder)
        tensors = dist_checkpointing.load_tensors_metadata(str(out / WEIGHTS))
        stored[spec] = {key: tuple(tensor.global_shape) for key, tensor in tensors.items()}
        load_weights(reader, out, hf)
        after = dict(export_hf_weights(reader, family_of(hf).weight_table(hf)))
        changed[spec] = sorted(original.names ^ after.keys())
        changed[spec] += [
            n for n in original.names & after.keys() if not original.tensor(n).equal(after[n].cpu())
        ]
    return {"stored": stored, "changed": changed}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    for name, (architecture, changes) in MODELS.items():
        write_family(folder / name, architecture, **changes)
    return folder


@pytest.fixture(scope="module")
def on_one(models: Path) -> dict[str, dict[str, Any]]:
    return run_ranks(compare_all, 1, models, str(models), list(MODELS), {}, is_fresh=True)[0]


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_finds_its_weights(on_one: dict[str, dict[str, Any]], name: str) -> None:
    result = on_one[name]
    assert {f"{LAYER}{each}" for each in NAMES[name]} <= set(result["names"])
    assert result["losses"]["transformer_engine"] == pytest.approx(result["losses"]["torch"], rel=1e-5)
    assert max(result["errors"].values()) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_one_spec_is_one_of_the_other(on_one: dict[str, dict[str, Any]], name: str) -> None:
    stored, changed = on_one[name]["stored"], on_one[name]["changed"]
    assert stored["transformer_engine"] == stored["torch"]
    assert changed == {"torch": [], "transformer_engine": []}


def test_experts_of_other_ranks_find_theirs(models: Path, tmp_path: Path) -> None:
    results = run_ranks(compare_all, 2, tmp_path, str(models), ["experts"], {"expert": 2}, is_fresh=True)
    for result in results:
        assert max(result["experts"]["errors"].values()) <= 1e-5
