"""Adapters of every kind of layout equal one process's: their start, gradients, updates and merged weights."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.runtime.process import Runtime
from tests.distributed.test_lora import config_of, main_gradient, randomize, train_batch
from tests.support.ranks import run_ranks
from tests.support.roundoff import OF_LAST_BITS, Error, move_last_bits, relative, require_close
from tests.support.tiny_families import write_family

NUM_LAYERS = 4
MODELS = {"experts": "Qwen3MoeForCausalLM", "dense": "Qwen2ForCausalLM", "latent": "DeepseekV3ForCausalLM"}
TARGETS = {
    **dict.fromkeys(("experts", "dense"), ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "latent": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "DP2, overlapped": OVERLAPPED,
        "TP2": {"tensor": 2},
        "EP2": {"expert": 2},
        "TP2 EP2 ETP1": {"tensor": 2, "expert": 2, "expert_tensor": 1},
        "PP2": {"pipeline": 2},
        "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
        "CP2": {"context": 2},
        "dense TP2": {"tensor": 2},
        "dense PP2": {"pipeline": 2},
        "latent TP2": {"tensor": 2},
    },
    4: {
        "EP2 ETP2": {"expert": 2, "expert_tensor": 2},
        "TP2 EP2 ETP2": {"tensor": 2, "expert": 2},
        "TP2 PP2": {"tensor": 2, "pipeline": 2},
        "TP2 EP2 DP2, overlapped": {"tensor": 2, "expert": 2, "expert_tensor": 1, **OVERLAPPED},
    },
}
# Adam with so large an epsilon is smooth in the gradient: equal gradients, clipped by equal norms, give equal
# updates; with so large a rate they are not lost in the rounding of weights.
SMOOTH = {"lr": 1.0, "eps": 0.03, "clip_grad": 0.5}


def measure(
    runtime: Runtime, folder: str, parallel: dict[str, Any], *, seed: int | None = None
) -> dict[str, dict[str, Tensor]]:
    """Two gradient steps; every tensor whole, on every rank. A seed moves the last bits of the weights."""
    from megatron_dppo.actor.actor import Actor
    from tests.support.adapter_tensors import adapter_tensors

    is_overlapped = "overlap_grad_reduce" in parallel
    optimizer = SMOOTH | {"distributed": is_overlapped}
    case = {"targets": TARGETS[Path(folder).name]}
    actor = Actor(config_of(Path(folder), case, parallel=parallel, optimizer=optimizer), runtime)
    start = adapter_tensors(actor.chunks)
    randomize(actor)
    if seed is not None:
        move_last_bits((each for chunk in actor.chunks for each in chunk.parameters()), seed)
    actor.optimizer.reload_model_params()
    before = adapter_tensors(actor.chunks)
    batch, _ = train_batch(actor, runtime, NUM_LAYERS)
    norm = actor.train_step(batch, is_first=True).metrics.values()["optimizer/grad_norm"]
    assert norm > SMOOTH["clip_grad"], "gradients are clipped"
    gradients, updates = {}, {}
    if not is_overlapped:  # each rank has a part of the gradients, and updates are still on their way
        gradients = adapter_tensors(actor.chunks, main_gradient)
        updates = {name: tensor - before[name] for name, tensor in adapter_tensors(actor.chunks).items()}
    actor.train_step(batch, is_first=False)
    merged = {name: tensor.cpu().clone() for name, tensor in actor.weights()}
    norms = {"": torch.tensor(norm)}
    return {"start": start, "norm": norms, "gradients": gradients, "updates": updates, "merged": merged}


def measure_all(
    runtime: Runtime, folder: str, layouts: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Error]]:
    """The worst error of each kind in each layout, in one spawn.

    Updates lose digits in the rounding of weights, and a second step multiplies what differs after the first.
    They do so in the reference, too, when its last bits move.
    """
    errors: dict[str, dict[str, Error]] = {}
    for name, parallel in layouts.items():
        model = f"{folder}/{next((each for each in MODELS if name.startswith(each)), 'experts')}"
        found = measure(runtime, model, parallel)
        expected, roundoffs = torch.load(f"{model}.reference")
        errors[name] = {}
        for kind, tensors in found.items():
            assert tensors.keys() in (expected[kind].keys(), set()), "each is compared, none twice"
            error = max((relative(tensor, expected[kind][key]) for key, tensor in tensors.items()), default=0.0)
            errors[name][kind] = Error.of(error, roundoffs[kind], OF_LAST_BITS)
        gc.collect()  # the threads of process groups end with the last reference to them
    return errors


def write_references(runtime: Runtime, folder: str) -> None:
    """What one process gives, and how much each kind of it changes with the last bits of weights."""
    for model in MODELS:
        result = measure(runtime, f"{folder}/{model}", {})
        roundoffs = dict.fromkeys(result, 0.0)
        for seed in (0, 1):
            for kind, tensors in measure(runtime, f"{folder}/{model}", {}, seed=seed).items():
                changes = [relative(tensor, result[kind][key]) for key, tensor in tensors.items()]
                roundoffs[kind] = max(roundoffs[kind], *changes)
        torch.save((result, roundoffs), f"{folder}/{model}.reference")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora_layouts")
    for name, architecture in MODELS.items():
        write_family(folder / name, architecture, num_hidden_layers=NUM_LAYERS)
    run_ranks(write_references, 1, folder, str(folder))
    return folder


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_equals_one_process(reference: Path, world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    for errors in run_ranks(measure_all, world_size, reference, str(reference), layouts):
        assert errors.keys() == layouts.keys()
        assert all(of_kinds.pop("start").value == 0.0 for of_kinds in errors.values())
        merged = {name: of_kinds.pop("merged") for name, of_kinds in errors.items()}
        require_close({f"{name}: {kind}": e for name, of in errors.items() for kind, e in of.items()})
        require_close(merged, coarsest=5e-3)
