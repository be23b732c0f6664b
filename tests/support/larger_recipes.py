"""Layouts that other projects publish as working for larger models, or with latent attention: sizes only.

Fields are as in `qwen3_30b_recipes`. Uneven pipelines have other numbers of layers in the first and last stage.
"""

from tests.support.published_models import DEEPSEEK_V3, GLM45, GLM47_FLASH, KIMI_K2, MOONLIGHT, QWEN3_235B
from tests.support.qwen3_30b_recipes import Recipe

LARGER = (
    Recipe(
        "slime, Moonlight on one node",
        8,
        {"tensor": 4, "expert": 8},
        gpu_tokens=8192,
        response_tokens=4096,
        prompts=(32, 8),
        model=MOONLIGHT,
    ),
    Recipe(
        "slime, GLM-4.7-Flash on one node",
        8,
        {"tensor": 2, "pipeline": 2, "context": 2, "expert": 4},
        gpu_tokens=32768,
        response_tokens=32768,
        prompts=(128, 8),
        needs=("offload", "recompute"),
        model=GLM47_FLASH,
        has_routes=False,  # of a recipe without R3; they would be 6 GB, of which their loss leaves none
    ),
    Recipe(
        "slime, Qwen3-235B-A22B on eight nodes",
        64,
        {"tensor": 4, "pipeline": 4, "context": 2, "expert": 16},
        gpu_tokens=16384,
        response_tokens=8192,
        prompts=(8, 8),
        engine=None,
        needs=("offload", "recompute"),
        model=QWEN3_235B,
    ),
    Recipe(
        "slime, GLM-4.5 on eight nodes",
        64,
        {"tensor": 8, "pipeline": 4, "context": 2, "expert": 16},
        gpu_tokens=16384,
        response_tokens=32768,
        prompts=(32, 8),
        engine={"tp_size": 32, "mem_fraction_static": 0.7},
        needs=("offload", "recompute"),
        model=GLM45,
    ),
    Recipe(
        "slime, DeepSeek-R1 on sixteen nodes",
        128,
        {"tensor": 8, "pipeline": 4, "context": 4, "expert": 32},
        gpu_tokens=16384,
        response_tokens=32768,
        prompts=(32, 8),
        engine={"tp_size": 64, "mem_fraction_static": 0.7},  # of 8-bit weights, by config.json
        needs=("offload", "recompute"),
        model=DEEPSEEK_V3,
    ),
    Recipe(
        "slime, Kimi-K2 on thirty-two nodes",
        256,
        {"tensor": 8, "pipeline": 8, "context": 4, "expert": 32},
        gpu_tokens=16384,
        response_tokens=32768,
        prompts=(32, 8),
        engine=None,  # theirs has 16 GPUs, of which 64 GB each would be its weights
        needs=("offload", "recompute"),
        model=KIMI_K2,
    ),
)
