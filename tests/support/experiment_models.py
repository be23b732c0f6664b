"""config.json of the experiments' models, typed by hand: what their sizes and families follow from.

`OctoThinker-3B-Hybrid-Base` has the sizes of Llama-3.2-3B, from which it was trained. Those of Moonlight,
GLM-4.5-Air, MiniMax-M2, gpt-oss and Qwen3.5 were typed from memory of the published files; that they add up to
the published numbers of parameters is all that was compared.
"""

from typing import Any

from tests.support.published_models import (
    GLM45_AIR,
    GPT_OSS_20B,
    MINIMAX_M2,
    MOONLIGHT,
    QWEN3_235B,
    QWEN35_35B,
)

_SHARED: dict[str, Any] = {"attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6}
_QWEN3 = _SHARED | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
_QWEN3_30B = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
OF_EXPERIMENTS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B-Base": _QWEN3_30B,
    "Qwen3-30B-A3B": _QWEN3_30B | {"max_position_embeddings": 40960},
    "Qwen3-235B-A22B": _QWEN3_30B | QWEN3_235B,
    "MiniMax-M2": MINIMAX_M2,
    "gpt-oss-20b-bf16": {key: GPT_OSS_20B[key] for key in GPT_OSS_20B if key != "quantization_config"}
    | {"model_type": "gpt_oss"},
    "Qwen3.5-35B-A3B": QWEN35_35B,
    "Qwen3-8B-Base": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen3-4B-Base": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B-Base": _QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": _SHARED
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OctoThinker-3B-Hybrid-Base": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Moonlight-16B-A3B": _SHARED | MOONLIGHT | {"model_type": "deepseek_v3"},
    "GLM-4.5-Air": _SHARED | GLM45_AIR | {"model_type": "glm4_moe"},
}
