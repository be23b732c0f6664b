"""Llama 2 and 3, dense, with plain or llama3 rotary frequencies."""

from megatron_dppo.models.family import ModelFamily, backbone_config
from megatron_dppo.models.weight_map import BACKBONE, DENSE_MLP, OUTPUT

LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    transformer_config=backbone_config,
    rules=(*BACKBONE, OUTPUT, *DENSE_MLP),
)
