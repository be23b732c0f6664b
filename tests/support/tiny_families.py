"""A tiny random model of any supported architecture, as a Hugging Face checkpoint."""

from pathlib import Path
from typing import Any

import torch
import transformers

from examples.make_tiny import OWN_SIZES, tiny_config
from examples.make_tiny import YARN as YARN
from tests.support.tiny import LAYERS, VOCAB

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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


def config_of(architecture: str, **changes: Any) -> Any:
    """Transformers' config of a tiny model."""
    is_linear = "linear_num_key_heads" in OWN_SIZES.get(architecture, {})
    smoother = {"initializer_range": 0.1} if is_linear else {}  # the states' rounding grows with it
    return tiny_config(architecture, SIZES | smoother, **changes)


def write_family(folder: Path, architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a random model whose distributions and routers are far from flat, norms and biases included."""
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_of(architecture, **changes))
    stored = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (tensor.dim() == 1 or name.endswith("_bias")) and name in stored:
                tensor.add_((1.5 if name.endswith("sinks") else 0.1) * torch.randn_like(tensor))
            if name.endswith("A_log"):
                tensor.sub_(3)  # or states would forget everything within a token
    model.to(dtype).save_pretrained(folder)
    return folder
