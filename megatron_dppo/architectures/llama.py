"""Llama 2 and 3, dense, with plain or llama3 rotary frequencies."""

from megatron_dppo.architectures.family import SILU_ONLY, ModelFamily, SglangFacts
from megatron_dppo.architectures.weight_map import BACKBONE, DENSE_MLP, OUTPUT

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    rules=(*BACKBONE, OUTPUT, *DENSE_MLP),
    variants={
        **SILU_ONLY,
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "pretraining_tp": (1, 1),
    },
    sglang=SglangFacts(drops_block_scales=True),
)
