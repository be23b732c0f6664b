"""A peft adapter that is added to a checkpoint gives the bits that peft's own merge gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from converting import convert, converted, differences
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_families import write_family
from transformers import AutoModelForCausalLM

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention and MLP": (
        "Qwen2ForCausalLM",
        {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    ),
    "attention beside experts": ("Qwen3MoeForCausalLM", {"target_modules": ATTENTION}),
    "scaled by the root of the rank": ("LlamaForCausalLM", {"target_modules": ["q_proj"], "use_rslora": True}),
    "ranks and scales by pattern": (
        "Qwen3ForCausalLM",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.o_proj": 3},
            "alpha_pattern": {"k_proj": 5},
        },
    ),
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
    "another tensor": (lambda adapter: change_factors(adapter, "lora_B", "magnitude"), [FACTORS, "no factor"]),
}


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
