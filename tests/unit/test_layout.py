"""Layouts that are admitted, and the refusal of the others."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.architectures.layout import (
    PROVEN,
    Layout,
    LayoutKind,
    kind_of,
    layout_problems,
)
from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import LinearSizes, ModelSizes
from megatron_dppo.config import ParallelConfig
from megatron_dppo.errors import ConfigError, LayoutError

SIZES = ModelSizes(
    architecture="Qwen3MoeForCausalLM",
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=274,
    max_position_embeddings=64,
    rope_theta=1e6,
    num_experts=8,
    experts_per_token=2,
    moe_intermediate_size=64,
    moe_layers=(0, 1, 2, 3),
)
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 274,
    "max_position_embeddings": 64,
    "intermediate_size": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def layout_of_kind(kind: LayoutKind) -> dict[str, int]:
    """The smallest sizes of a kind."""
    sizes = dict.fromkeys(kind.split, 2)
    return sizes | {"expert_tensor": 1 if kind.expert_tensor == "whole" else 2}


@pytest.mark.parametrize("kind", sorted(PROVEN, key=str), ids=str)
@pytest.mark.parametrize("data", [1, 2])
def test_proven_kinds_are_admitted_with_data_parallelism_too(kind: LayoutKind, data: int) -> None:
    parallel = ParallelConfig.model_validate(layout_of_kind(kind))
    dense = parallel.tensor * parallel.pipeline * parallel.context
    experts = parallel.expert * (parallel.expert_tensor or 1) * parallel.pipeline
    world_size = math.lcm(dense, experts) * data
    assert kind_of(Layout.of(parallel, world_size)) == kind
    assert layout_problems(parallel, world_size, SIZES) == []


@pytest.mark.parametrize(
    ("parallel", "world_size", "where", "reason"),
    [
        (ParallelConfig(tensor=2, expert_tensor=1), 2, "parallel.expert_tensor", "silently wrong"),
        (ParallelConfig(expert_tensor=2), 2, "parallel.expert_tensor", "silently wrong"),
        (ParallelConfig(tensor=2, expert=2, expert_tensor=4), 8, "parallel", "not proven"),
        (ParallelConfig(tensor=2, pipeline=2, virtual_pipeline=2, context=2), 8, "parallel", "not proven"),
        (ParallelConfig(tensor=2), 3, "parallel.tensor * pipeline * context", "divisor of the 3"),
        (ParallelConfig(expert=2), 1, "parallel.expert * expert_tensor * pipeline", "divisor of the 1"),
        (ParallelConfig(expert=3), 3, "parallel.expert", "experts, 8"),
        (ParallelConfig(tensor=4, expert=2), 8, "parallel.tensor", "key-value heads, 2"),
        (ParallelConfig(tensor=3), 3, "parallel.tensor", "attention heads, 4"),
        (ParallelConfig(pipeline=5), 5, "parallel.pipeline * virtual_pipeline", "layers, 4"),
        (ParallelConfig(virtual_pipeline=2), 1, "parallel.virtual_pipeline", "without a pipeline"),
    ],
)
def test_refused_layouts_say_why(parallel: ParallelConfig, world_size: int, where: str, reason: str) -> None:
    problems = layout_problems(parallel, world_size, SIZES)
    assert any(p.where == where and reason in f"{p.found} {p.expected}" for p in problems), problems


@pytest.mark.parametrize(
    ("parallel", "world_size", "nearest"),
    [
        ({"tensor": 4, "expert": 2}, 8, "8 processes with parallel.tensor = 2 and parallel.expert = 2"),
        ({"tensor": 3}, 3, "3 processes with every parallel size 1"),
        (
            {"pipeline": 4, "virtual_pipeline": 2},
            4,
            "4 processes with parallel.pipeline = 2 and parallel.virtual_pipeline = 2",
        ),
        (
            {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "context": 2},
            8,
            "8 processes with parallel.pipeline = 2 and parallel.virtual_pipeline = 2 and parallel.context = 2",
        ),
        ({"tensor": 2, "expert_tensor": 1}, 2, "2 processes with parallel.tensor = 2"),
    ],
)
def test_a_refusal_names_the_nearest_layout_that_works(
    parallel: dict[str, int], world_size: int, nearest: str
) -> None:
    problems = layout_problems(ParallelConfig.model_validate(parallel), world_size, SIZES)
    assert {problem.action for problem in problems} == {f"Use {nearest}."}


def test_a_dense_model_has_no_experts_to_split() -> None:
    dense = ModelSizes(**{**vars(SIZES), "num_experts": None, "moe_layers": ()})
    problems = layout_problems(ParallelConfig(expert=2), 2, dense)
    assert [problem.where for problem in problems] == ["parallel.expert"]
    assert problems[0].action == "Use 2 processes with every parallel size 1."


@pytest.mark.parametrize(
    ("parallel", "where"), [({"context": 2}, "parallel.context"), ({"tensor": 2}, "parallel.tensor")]
)
def test_linear_attention_splits_key_heads_and_no_sequence(parallel: dict[str, int], where: str) -> None:
    """Two value heads for each of three key heads."""
    linear = LinearSizes((0, 1, 2), 3, 6, key_head_dim=8, value_head_dim=8, conv_width=4)
    problems = layout_problems(ParallelConfig.model_validate(parallel), 2, replace(SIZES, linear=linear))
    assert [problem.where for problem in problems] == [where]
    assert problems[0].action == "Use 2 processes with every parallel size 1."


def test_layout_without_sizes_still_checks_processes() -> None:
    assert layout_problems(ParallelConfig(), 1, None) == []
    assert layout_problems(ParallelConfig(tensor=2), 3, None)


def test_a_layout_that_does_not_divide_raises() -> None:
    with pytest.raises(LayoutError, match="multiple of 2"):
        Layout.of(ParallelConfig(tensor=2), 3)


@pytest.mark.parametrize("inside", ["config.json", "hf/config.json"])
@pytest.mark.parametrize("experts_key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("rope", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}])
def test_both_spellings_and_both_kinds_of_folder(
    tmp_path: Path, inside: str, experts_key: str, rope: dict[str, Any]
) -> None:
    content = {**DENSE, **EXPERTS, **rope, experts_key: 8, "num_key_value_heads": 2, "head_dim": 16}
    _write_config(tmp_path, content, inside)
    assert read_model_sizes(tmp_path) == SIZES


def test_dense_layers_among_moe_layers(tmp_path: Path) -> None:
    content = {**DENSE, **EXPERTS, "num_experts": 8, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    _write_config(tmp_path, content)
    assert read_model_sizes(tmp_path).moe_layers == (1,)


def test_a_dense_model(tmp_path: Path) -> None:
    _write_config(tmp_path, DENSE)
    sizes = read_model_sizes(tmp_path)
    assert (sizes.num_experts, sizes.moe_layers, sizes.head_dim, sizes.num_key_value_heads) == (None, (), 16, 4)


def test_a_dense_layer_needs_its_width(tmp_path: Path) -> None:
    content = {key: value for key, value in DENSE.items() if key != "intermediate_size"} | EXPERTS
    _write_config(tmp_path, content | {"num_experts": 8})
    assert read_model_sizes(tmp_path).intermediate_size == 0
    for dense in ({}, {"num_experts": 8, "mlp_only_layers": [1]}):
        _write_config(tmp_path, content | dense)
        with pytest.raises(ConfigError, match="no intermediate_size"):
            read_model_sizes(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"hidden_size": "x"}', '{"hidden_size": null}'])
def test_a_torn_config_is_an_error_for_users(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_sizes(tmp_path)


def test_a_missing_folder_is_an_error_for_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_model_sizes(tmp_path / "none")
    with pytest.raises(ConfigError, match="has neither"):
        read_model_sizes(tmp_path)


def test_layout_needs_no_torch() -> None:
    code = "import sys, megatron_dppo.architectures.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _write_config(folder: Path, content: dict[str, Any], inside: str = "config.json") -> None:
    path = folder / inside
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
