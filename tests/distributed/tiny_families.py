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
SIGMOID: dict[str, Any] = dict(
    moe_intermediate_size=16,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=2.5,
    n_group=1,
    topk_group=1,
    rms_norm_eps=1e-6,  # as transformers norms latents, whatever config.json says
)
LATENT: dict[str, Any] = SIGMOID | dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=12,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
GROUPS: dict[str, Any] = dict(n_group=2, topk_group=1)
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
OWN: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": EXPERT_SIZES,
    "MixtralForCausalLM": dict(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K),
    "Glm4MoeForCausalLM": SIGMOID | dict(attention_bias=True, rope_parameters=HALF),
    "DeepseekV3ForCausalLM": LATENT | GROUPS | dict(rope_parameters=YARN),
    "Glm4MoeLiteForCausalLM": {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
}
"""What an architecture has beside or instead of SIZES."""


def config_of(architecture: str, **changes: Any) -> Any:
    """Transformers' config of a tiny model."""
    own = OWN.get(architecture, {})
    settings = SIZES | own | changes
    if "kv_lora_rank" in own:  # their head_dim is another name of another size
        del settings["head_dim"]
    return getattr(transformers, architecture).config_class(**settings)


def write_family(folder: Path, architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a random model whose distributions and routers are far from flat, norms and biases included."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_of(architecture, **changes))
    stored = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and name in stored:
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.to(dtype).save_pretrained(folder)
    return folder
