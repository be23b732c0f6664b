"""Run by SGLang's interpreter: what its own code makes of quantised folders, as JSON on the last line."""

import json
import sys
from typing import Any

from sglang.srt.configs.load_config import LoadConfig  # type: ignore[import-not-found]
from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
from sglang.srt.layers.linear import ReplicatedLinear  # type: ignore[import-not-found]
from sglang.srt.model_loader.weight_utils import get_quant_config  # type: ignore[import-not-found]

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


EXCLUDABLE = ("model.layers.0.mlp.gate", "model.layers.0.mlp.experts", "model.layers.1.mlp.experts", "lm_head")


def reading(folder: str) -> dict[str, Any]:
    """The format, the modules left out, and what a linear of 64 inputs and 32 outputs wants to load."""
    model = ModelConfig(folder)
    found: Any = get_quant_config(model, LoadConfig(), FUSED)
    prefix = "model.layers.0.self_attn.o_proj"
    linear = ReplicatedLinear(64, 32, bias=False, quant_config=found, prefix=prefix)
    return {
        "quantization": model.quantization,
        "excluded": [name for name in EXCLUDABLE if found.is_layer_excluded(name)],
        "wanted": {name: [str(value.dtype), value.numel()] for name, value in linear.named_parameters()},
    }


if __name__ == "__main__":
    print()
    print(json.dumps([reading(folder) for folder in sys.argv[1:]]))
