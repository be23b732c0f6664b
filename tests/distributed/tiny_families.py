"""A tiny random model of any supported architecture, as a Hugging Face checkpoint."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny import EXPERTS, LAYERS, TOP_K, VOCAB

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.25,
    eos_token_id=0,
)
EXPERT_SIZES: dict[str, Any] = dict(
    moe_intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True
)


def write_family(folder: Path, architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a random model whose distributions and routers are far from flat, norms and biases included."""
    model_class = getattr(transformers, architecture)
    config_class = model_class.config_class
    has_experts = hasattr(config_class(), "num_experts")
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES | (EXPERT_SIZES if has_experts else {}) | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return folder
