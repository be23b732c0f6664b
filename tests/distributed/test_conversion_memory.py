"""A conversion's own memory does not grow with the model: it is a few files' and a few pieces'."""

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.registry import family_of
from megatron_dppo.checkpoints.hf_folder import write_hf_checkpoint
from tests.support.converting import converted
from tests.support.peak_memory import peak_memory

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 1000,
    "max_position_embeddings": 64,
}
MODEL_BYTES = 100_000_000
OWN_BYTES = 30_000_000
M_MMAP_THRESHOLD = -3  # of malloc.h


@pytest.fixture(autouse=True)
def _freed_memory_is_given_back() -> Iterator[None]:
    """Glibc would keep what is freed, by thread: as much again as is in use, and another amount in each run."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1
    yield
    libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the value that glibc adapts to


def write_random(folder: Path, config: dict[str, Any]) -> int:
    """A model of random weights; its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = family_of(config).hf_shapes(config)
    weights = ((name, torch.randn(shape).bfloat16()) for name, shape in shapes.items())
    write_hf_checkpoint(weights, folder / "hf", folder, 8_000_000)
    return sum(2 * torch.Size(shape).numel() for shape in shapes.values())


def test_own_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    write_random(tmp_path / "small", CONFIG | {"num_hidden_layers": 1, "num_experts": 2})
    model, options = tmp_path / "large", ("--shard-size", "4MB", "--writers", 2)
    assert write_random(model, CONFIG) > MODEL_BYTES
    for folder in (tmp_path / "small", model):  # the first one imports what the second one's memory is without
        peaks: dict[str, float] = {}
        with peak_memory(is_anonymous=True) as grown:
            converted("to-megatron", "--hf", folder / "hf", "--out", folder / "megatron", *options)
        peaks["to-megatron"] = grown[0]
        with peak_memory(is_anonymous=True) as grown:
            converted("to-hf", "--megatron", folder / "megatron", "--out", folder / "back", *options)
        peaks["to-hf"] = grown[0]
        with peak_memory(is_anonymous=True) as grown:
            converted("verify", folder / "hf", folder / "back")
        peaks["verify"] = grown[0]
    assert {way: peak for way, peak in peaks.items() if peak > OWN_BYTES} == {}


def test_upcycling_holds_a_file_and_an_expert(tmp_path: Path) -> None:
    dense = {key: value for key, value in CONFIG.items() if "expert" not in key and not key.startswith("moe")}
    dense |= {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 1024}
    write_random(tmp_path / "small", dense | {"num_hidden_layers": 1})
    write_random(tmp_path / "large", dense)
    options = ("--experts", 8, "--noise", 0.1, "--reinit", 0.5, "--shard-size", "4MB", "--writers", 2)
    for size in ("small", "large"):
        with peak_memory(is_anonymous=True) as grown:
            converted("upcycle", "--hf", tmp_path / size / "hf", "--out", tmp_path / f"{size} moe", *options)
    assert sum(file.stat().st_size for file in (tmp_path / "large moe").iterdir()) > MODEL_BYTES
    assert grown[0] < OWN_BYTES
