"""config.json of public models, sizes only, and jobs to plan with them."""

from typing import Any

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import ModelShape, model_shape
from megatron_dppo.architectures.registry import model_sizes
from megatron_dppo.checks import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.plan.job import FULL, Job, Machine

GB = 10**9
ON_16_GPUS = """
[model]
load = "model"
[parallel]
tensor = 4
context = 2
expert = 8
expert_tensor = 1
max_tokens_per_microbatch = 20480
[rollout]
engine = "sglang"
prompts_per_rollout = 256
samples_per_prompt = 16
max_response_tokens = 16384
[rollout.sglang]
colocated = true
weight_sync = "tensor"
[algorithm]
minibatches_per_rollout = 8
[optimizer]
offload = true
[sglang]
tp_size = 8
mem_fraction_static = 0.7
"""
"""A run of `QWEN3_30B` on 16 GPUs of 80 GB, as TOML."""
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
LLAMA3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def shape_of(content: dict[str, Any]) -> ModelShape:
    return model_shape(content)


RECOMPUTED: dict[str, Any] = {f"megatron.{key}": value for key, value in FULL.keys().items()}
COLOCATED: dict[str, Any] = {"rollout.sglang": {"colocated": True, "weight_sync": "tensor"}}


def job_of(
    content: dict[str, Any] = QWEN3_30B,
    settings: dict[str, Any] | None = None,
    *,
    num_gpus: int = 8,
    gpu_bytes: int = 80 * GB,
    host_bytes: int | None = None,
) -> Job:
    """A job on SGLang; by default it has its own GPUs."""
    tables: dict[str, dict[str, Any]] = {
        "rollout": {"engine": "sglang", "max_response_tokens": 8192},
        "parallel": {"max_tokens_per_microbatch": 20480},
    }
    for key, value in (settings or {}).items():
        section, name = key.split(".")
        tables.setdefault(section, {})[name] = value
    config = Config.model_validate(tables)
    facts = Facts(config, num_gpus, content, model_sizes(content), columns={}, transformer_engine=None)
    return Job.of(config, facts, Machine(num_gpus, gpu_bytes, host_bytes))


def layout_of(world_size: int, **sizes: int) -> Layout:
    """A layout whose data size follows from the others; experts are not split over tensor ranks."""
    dense = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("context", 1)
    return Layout(world_size=world_size, data=world_size // dense, **({"expert_tensor": 1} | sizes))
