"""Weights on disk reach an engine as an actor's do: every tensor once, whatever the family."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.convert.sources import StoredWeights
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.engines.weight_sync.factory import require_cover
from megatron_dppo.runtime.process import Runtime
from tests.support.tiny_families import write_family

HERE = Runtime(torch.device("cpu"), 0, 1)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_engine_loads_every_family_from_disk(tmp_path: Path, architecture: str, is_tied: bool) -> None:
    folder = write_family(tmp_path / "model", architecture, tie_word_embeddings=is_tied)
    stored = StoredWeights(folder, torch.float32, HERE)
    engine = TransformersEngine(
        AutoConfig.from_pretrained(folder), eos_token_ids=(0,), weights="float32", batch_size=2, device="cpu"
    )
    engine.load_weights(stored.weights(), 3)
    assert engine.weight_version == 3
    described = stored.describe_weights()
    require_cover(described, folder)
    given = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.weights()}
    assert given == {name: (tensor.shape, tensor.dtype) for name, tensor in described.items()}


def test_weights_come_in_the_trainers_type_and_their_identity_changes_with_the_files(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", "Qwen3ForCausalLM")
    stored = StoredWeights(folder, torch.bfloat16, HERE)
    exact = dict(StoredWeights(folder, torch.float32, HERE).weights())
    assert all(torch.equal(tensor, exact[name].bfloat16()) for name, tensor in stored.weights())
    before = stored.identity
    assert StoredWeights(folder, torch.bfloat16, HERE).identity == before
    write_family(folder, "Qwen3ForCausalLM", initializer_range=0.3)
    assert StoredWeights(folder, torch.bfloat16, HERE).identity != before
