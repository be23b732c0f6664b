"""Layouts that other projects publish as working for Qwen3-30B-A3B on GPUs with 80 GB: sizes only.

Tokens are of one GPU's micro-batch. If recompute or offload is part of a recipe, `needs` has options without
which of them our arithmetic finds it too large. That is with all logits of a micro-batch in float32, and what a
loss computes from them, as in that project's stack. `spared` lists the needed options that our loss from
hidden states can do without.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.plan.units import GIB
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES
from tests.support.plan_models import QWEN3_30B


@dataclass(frozen=True)
class Recipe:
    """One published run.

    Attributes:
        source: The project and the run.
        num_gpus: GPUs of the trainer.
        sizes: Parallel sizes; experts are not split over tensor ranks in any of them.
        gpu_tokens: Most tokens of a micro-batch on one GPU.
        is_recomputed: All activations.
        is_offloaded: Adam on the host.
        engine: [sglang] as close to the recipe's engine as its source allows; `None` if it has separate GPUs.
        prompts: Prompts per gradient step, with this many samples each.
        needs: Options without which it does not fit.
        spared: Options in `needs` without which it fits with our loss.
        float32_copies: Copies of all logits in their loss at once: an assumption. NeMo's of its performance
            runs holds none.
        layer_spec: model.layer_spec; all of them use Transformer Engine, and ours is used if it fits, too.
        model: Its config.json.
        engine_residue_bytes: Kept by their engine in training: an assumption. NeMo's vLLM captures no
            graphs of prefills of 8192 tokens.
        has_routes: Count routes of R3 on the GPU, whether the recipe has R3 or not.
    """

    source: str
    num_gpus: int
    sizes: dict[str, int]
    gpu_tokens: int
    response_tokens: int
    prompts: tuple[int, int]
    is_recomputed: bool = True
    is_offloaded: bool = True
    engine: dict[str, Any] | None = field(default_factory=lambda: {"tp_size": 8, "mem_fraction_static": 0.7})
    needs: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    layer_spec: str = "torch"
    float32_copies: int = 4
    model: dict[str, Any] = field(default_factory=lambda: QWEN3_30B)
    engine_residue_bytes: int = ENGINE_RESIDUE_BYTES
    has_routes: bool = True


NOT_RECOMPUTED: dict[str, Any] = {"is_recomputed": False, "is_offloaded": False}
RECIPES = (
    Recipe(
        "slime, one node",
        8,
        {"tensor": 4, "expert": 8},
        gpu_tokens=20480,
        response_tokens=8192,
        prompts=(32, 8),
        needs=("offload", "recompute"),
        spared=("recompute",),
    ),
    Recipe(
        "slime, two nodes",
        16,
        {"pipeline": 4, "expert": 4},
        gpu_tokens=20480,
        response_tokens=8192,
        prompts=(16, 8),
        engine={"tp_size": 8, "mem_fraction_static": 0.6},
        needs=("offload", "recompute"),
        spared=("offload",),
    ),
    Recipe(
        "slime, R3",
        8,
        {"tensor": 4, "context": 2, "expert": 8},
        gpu_tokens=16384,
        response_tokens=8192,
        prompts=(4, 4),
        engine={"tp_size": 8, "mem_fraction_static": 0.8},
        needs=("offload",),
    ),
    Recipe(
        "miles, one node",
        8,
        {"tensor": 4, "expert": 8},
        gpu_tokens=32768,
        response_tokens=8192,
        prompts=(32, 8),
        needs=("offload", "recompute"),
    ),
    Recipe(
        "miles, asynchronous on two nodes",
        8,
        {"tensor": 8, "expert": 8},
        gpu_tokens=9216,
        response_tokens=8192,
        prompts=(32, 8),
        engine=None,
        needs=("offload",),
    ),
    Recipe(
        "verl, R3 on six nodes",
        48,
        {"pipeline": 6, "expert": 8},
        gpu_tokens=2048,
        response_tokens=512,
        prompts=(3, 8),
        engine={"tp_size": 4, "mem_fraction_static": 0.65},
    ),
    Recipe(
        "NeMo RL, eight nodes",
        64,
        {"tensor": 2, "expert": 8},
        gpu_tokens=4096,
        response_tokens=2048,
        prompts=(16, 32),
        engine={"tp_size": 4, "mem_fraction_static": 0.7},
        **NOT_RECOMPUTED,
    ),
    Recipe(
        "NeMo RL, R3 on eight nodes",
        64,
        {"tensor": 4, "pipeline": 2, "context": 2, "expert": 4},
        gpu_tokens=4096,
        response_tokens=2048,
        prompts=(16, 8),
        engine={"tp_size": 4, "mem_fraction_static": 0.7},
        **NOT_RECOMPUTED,
    ),
    Recipe(
        "NeMo RL, performance on four nodes",
        32,
        {"expert": 8},
        gpu_tokens=4096,
        response_tokens=2048,
        prompts=(64, 32),
        engine={"tp_size": 2, "mem_fraction_static": 0.7},
        engine_residue_bytes=3 * GIB,
        layer_spec="transformer_engine",
        float32_copies=0,
        **NOT_RECOMPUTED,
    ),
    Recipe(
        "NeMo RL, 32 K tokens on four nodes",
        32,
        {"tensor": 4, "expert": 8},
        gpu_tokens=32768,
        response_tokens=30720,
        prompts=(64, 8),
        is_offloaded=False,
        engine={"tp_size": 4, "mem_fraction_static": 0.7},
        needs=("recompute",),
    ),
)
