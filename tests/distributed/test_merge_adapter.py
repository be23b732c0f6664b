"""A peft adapter that is added to a checkpoint gives the bits that peft's own merge gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import KasaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.converting import convert, converted, differences
from tests.support.tiny_families import write_family

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention and MLP": (
        "Qwen2ForCausalLM",
        {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    ),
    "attention of a model with experts": ("Qwen3MoeForCausalLM", {"target_modules": ATTENTION}),
    "scaled by the root of the rank": ("LlamaForCausalLM", {"target_modules": ["q_proj"], "use_rslora": True}),
    "ranks and scales by pattern": (
        "Qwen3ForCausalLM",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.o_proj": 3},
            "alpha_pattern": {"k_proj": 5},
        },
    ),
    "some layers, drawn otherwise": (
        "LlamaForCausalLM",
        {
            "target_modules": ATTENTION,
            "exclude_modules": ["k_proj"],
            "layers_to_transform": [1],
            "init_lora_weights": "orthogonal",
            "lora_dropout": 0.1,
        },
    ),
    "EVA's start": ("LlamaForCausalLM", {"target_modules": r".*\.[qv]_proj", "init_lora_weights": "eva"}),
}
FACTORS = "adapter_model.safetensors"


def make(folder: Path, architecture: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """A model as `hf`, an adapter with random factors as `adapter`, and what peft merges as `merged`."""
    write_family(folder / "hf", architecture, dtype)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=dtype)
    model: Any = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ADAPTERS)
def test_the_merge_is_pefts_to_the_bit(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    make(tmp_path, *ADAPTERS[case], dtype)
    converted(
        "merge-adapter", "--hf", tmp_path / "hf", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out"
    )
    assert differences(tmp_path / "merged", tmp_path / "out") == []
    assert differences(tmp_path / "hf", tmp_path / "out") != []


def change_config(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_factors(adapter: Path, old: str, new: str | None, rows: int | None = None) -> None:
    tensors = load_file(adapter / FACTORS)
    for name in [name for name in tensors if old in name and "layers.0." in name]:
        tensor = tensors.pop(name)
        if new is not None:
            tensors[name.replace(old, new)] = tensor[:rows].clone()
    save_file(tensors, adapter / FACTORS)


BAD: dict[str, tuple[Any, list[str]]] = {
    "no adapter": (lambda adapter: (adapter / "adapter_config.json").unlink(), ["adapter_config.json"]),
    "another method": (lambda adapter: change_config(adapter, peft_type="IA3"), ["adapter_config.json", "IA3"]),
    "DoRA": (lambda adapter: change_config(adapter, use_dora=True), ["adapter_config.json", "use_dora"]),
    "another model": (
        lambda adapter: change_factors(adapter, "layers.0", "layers.9"),
        [FACTORS, "model.layers.9.self_attn", "has not"],
    ),
    "a factor alone": (lambda adapter: change_factors(adapter, "lora_B", None), ["lora_A alone"]),
    "a wrong shape": (
        lambda adapter: change_factors(adapter, "lora_B", "lora_B", 3),
        [FACTORS, "does not fit"],
    ),
    "another rank than its config": (lambda adapter: change_config(adapter, r=8), ["has rank 4; expected 8"]),
    "a module that peft would not load": (
        lambda adapter: change_config(adapter, target_modules=["v_proj"]),
        [FACTORS, "is of no module that adapter_config.json names"],
    ),
    "a layer that peft would not load": (
        lambda adapter: change_config(adapter, layers_to_transform=[1]),
        [FACTORS, "layers.0", "is of no module that adapter_config.json names"],
    ),
    "LoftQ": (lambda adapter: change_config(adapter, init_lora_weights="loftq"), ["'loftq'", "W + scaling"]),
    "a key of a newer peft": (lambda adapter: change_config(adapter, use_xlora=True), ["use_xlora = True"]),
    "no scale": (
        lambda adapter: change_config(adapter, lora_alpha=None),
        ["lora_alpha = None", "adapter_config.json"],
    ),
    "another tensor": (lambda adapter: change_factors(adapter, "lora_B", "magnitude"), [FACTORS, "no factor"]),
}


UNLIKE_LORA: list[dict[str, Any]] = [
    {"alora_invocation_tokens": [1, 2]},
    *({"init_lora_weights": kind} for kind in ("pissa", "pissa_niter_2", "olora", "mica")),
    {"use_dora": True},
    {"lora_bias": True},
    {"bias": "all"},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [1, 2]},
    {"layer_replication": [[0, 2], [1, 2]]},
    {"kasa_config": KasaConfig()},
]
"""Options of adapters that peft itself writes here, and that are more than W + scaling * B A."""


@pytest.mark.parametrize("options", UNLIKE_LORA, ids=lambda options: str(*options.items()))
def test_adapters_that_are_more_than_a_product_are_refused_by_key(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    write_family(tmp_path / "hf", "LlamaForCausalLM")
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    get_peft_model(base, config).save_pretrained(str(tmp_path / "adapter"))
    done = convert(
        "merge-adapter", "--hf", tmp_path / "hf", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out"
    )
    assert done.exit_code == 2, done.output
    assert f"found {next(iter(options))} = " in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", BAD)
def test_other_adapters_are_refused(tmp_path: Path, case: str) -> None:
    make(tmp_path, "LlamaForCausalLM", {"target_modules": ["q_proj"]}, torch.float32)
    change, words = BAD[case]
    change(tmp_path / "adapter")
    done = convert(
        "merge-adapter", "--hf", tmp_path / "hf", "--adapter", tmp_path / "adapter", "--out", tmp_path / "out"
    )
    assert done.exit_code == 2, done.output
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert not (tmp_path / "out").exists()
