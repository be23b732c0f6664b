"""The model families that a real server serves on a CPU, and their tiny models."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.engines.sglang.model import INTERVAL, attention_interval
from tests.distributed.test_families import CASES
from tests.support.sanity_run import TOKENS, add_task
from tests.support.serving import OPTIONS
from tests.support.tiny_families import SIZES, write_family

IN_CI = ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Grouped-query and latent attention with a query rank; sigmoid routers with biases, shared experts."""
NOT_ON_CPUS = ("GptOssForCausalLM",)
"""SGLang's attention with sinks needs a GPU, or a CPU with AMX and its compiled kernels."""
CASES_SERVED = (
    *(name for name in FAMILIES if name not in NOT_ON_CPUS),
    *("DeepSeek-V3: four groups, of which two", "GLM-4.5: head norms", "Moonlight"),
)
"""Every other architecture, and variants whose servers compute otherwise."""


def write_served_case(task: Path, case: str) -> Path:
    """Write a case's model, with config.json as publishers write it, and the sanity task into one folder."""
    architecture, changes = CASES[case]
    family = FAMILIES[architecture]
    if family.sglang.derives_head_dim:
        changes = {"head_dim": SIZES["hidden_size"] // SIZES["num_attention_heads"]} | changes
    folder = write_family(task / "model", architecture, **TOKENS | changes)
    add_task(task)
    file = folder / "config.json"
    hf: dict[str, Any] = json.loads(file.read_text())
    keys = dict(family.sglang.config_keys)
    if family.sglang.has_dense_layers:
        keys["first_k_dense_replace"] = family.sizes_of(hf).moe_layers[0]
    if family.sizes_of(hf).linear is not None:
        keys[INTERVAL] = attention_interval(family.sizes_of(hf))
    file.write_text(json.dumps(hf | keys))
    return folder


def served_tables(task: Path, case: str) -> dict[str, dict[str, Any]]:
    """A config's tables of a run in `task`: its server, and pushes in buckets smaller than any layer."""
    facts = FAMILIES[CASES[case][0]]
    has_routes = any(rule.is_expert for rule in facts.rules)
    return {
        "run": {"folder": str(task / "run")},
        "model": {"load": str(task / "model"), "dtype": "float32"},
        "rollout": {
            "engine": "sglang",
            "routing_replay": "replay" if has_routes else "off",
            "sglang": {"sync_bucket_bytes": 8000},
        },
        "sglang": OPTIONS | {"context_length": 64},
    }


def model_of(folder: Path, weights: Path) -> torch.nn.Module:
    """Transformers' model of `folder`, in float32, with the tensors of a file of safetensors."""
    filled = weights.parent / "config.json"
    filled.write_text((folder / "config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32).eval()
