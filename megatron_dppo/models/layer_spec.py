"""Layer specs: ours (`torch`), a Megatron-Core transformer of plain PyTorch modules, and Transformer Engine's.

Ours runs on every device of PyTorch, CPU included. It has the same checkpoint keys as Megatron's Transformer
Engine spec, so that a checkpoint written with one loads into the other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dppo.architectures.megatron_options import LayerSpecName
from megatron_dppo.architectures.sizes import (
    BIASED_EXPERTS,
    BIASED_OUTPUT,
    OUTPUT_GATE,
    WIDE_NORM,
    ZERO_CENTRED,
    ModelSizes,
)
from megatron_dppo.models.attention import PackedAttention
from megatron_dppo.models.delta_net import GatedAttention, GatedDeltaNet, ZeroCentredNorm
from megatron_dppo.models.experts import BiasedExperts, BiasedMoELayer, GroupedExperts


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm; unlike Megatron's wrapper it works with sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron reads it


class WideNorm(torch.nn.Module):
    """Root-mean-square norm over all heads at once, of which tensor-parallel ranks have some each."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.num_heads, self.eps = self.heads_of(config), eps
        own = self.num_heads // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.zeros(own * hidden_size, dtype=config.params_dtype))

    def heads_of(self, config: TransformerConfig) -> int:
        """Return the number of heads, on all ranks."""
        return config.num_attention_heads

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [s, b, heads, head size], of this rank's heads, in float32 without a copy for backward."""
        length = torch.linalg.vector_norm(heads, dim=(-2, -1), keepdim=True, dtype=torch.float32)
        total = reduce_from_tensor_model_parallel_region(length.square())
        mean = copy_to_tensor_model_parallel_region(total) / (self.num_heads * heads.shape[-1])
        normed = (heads * torch.rsqrt(mean + self.eps)).to(heads.dtype)
        return self.weight.view(heads.shape[-2:]) * normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the weight as a shard of all heads'."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets
        )


class WideKeyNorm(WideNorm):
    """The same of keys."""

    def heads_of(self, config: TransformerConfig) -> int:
        """Return the number of heads of keys, on all ranks."""
        assert config.num_query_groups is not None
        return config.num_query_groups


class WideNormAttention(SelfAttention):
    """Attention with wide norms, which Megatron's option for norms of single heads does not know.

    That option would sum their gradients over tensor-parallel ranks. Without it, Megatron-Core 0.19.2
    refuses norms in the spec.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        size, eps = self.hidden_size_per_attention_head, config.layernorm_epsilon
        self.q_layernorm = WideNorm(config, size, eps)
        self.k_layernorm = WideKeyNorm(config, size, eps)


class WholeLinear(torch.nn.Module):
    """Linear that is replicated on tensor-parallel ranks, each of which applies it to its sequence slice."""

    def __init__(self, config: TransformerConfig, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_outputs, num_inputs, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron reads it

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return [s, b, outputs] of [s, b, inputs], and no bias."""
        return F.linear(hidden, self.weight), None


class BiasedOutput(RowParallelLinear):
    """Row-parallel linear with a bias, which Megatron gives to attention only with biases everywhere."""

    def __init__(self, *given: Any, bias: bool, **options: Any) -> None:
        super().__init__(*given, bias=True, **options)


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention, with projections down that are replicated on every tensor-parallel rank.

    Megatron accepts only its own classes for these. With its split classes gradients are silently wrong: ranks
    gather the key part that all heads share, but each returns only its own heads' gradient.
    """

    config: MLATransformerConfig

    def __init__(self, config: MLATransformerConfig, *given: Any, **options: Any) -> None:
        super().__init__(config, *given, **options)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        num_outputs = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, num_outputs)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return what the spec names; Megatron 0.19 would put a norm before queries that have no latent."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def torch_layer_spec(config: TransformerConfig, sizes: ModelSizes, layer: int) -> ModuleSpec:
    """Return the spec of one decoder layer (0-based), with experts or dense."""
    bias_dropout_add: Any = get_bias_dropout_add  # Megatron annotates it as a module
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    norm: Any = norm_of(sizes)
    norm_keys = dict[str, str]()
    if layer in sizes.linear_layers:
        attention = ModuleSpec(module=GatedDeltaNet)
    elif sizes.latent is not None:
        attention, norm_keys = _latent_attention()
    else:
        attention, norm_keys = _grouped_attention(config, sizes)
    if layer in sizes.moe_layers:
        # Shared experts are built if the config has a width for them.
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
        is_biased = BIASED_EXPERTS in sizes.options
        kind = ModuleSpec(module=BiasedExperts if is_biased else GroupedExperts)
        experts = MoESubmodules(experts=kind, shared_experts=shared)
        mlp = ModuleSpec(module=BiasedMoELayer if is_biased else MoELayer, submodules=experts)
    else:
        mlp = ModuleSpec(module=MLP, submodules=linears)
        norm_keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=bias_dropout_add,
            sharded_state_dict_keys_map=norm_keys,
        ),
    )


def norm_of(sizes: ModelSizes) -> type[RMSNorm] | type[ZeroCentredNorm]:
    """Return the class of the model's norms."""
    return ZeroCentredNorm if ZERO_CENTRED in sizes.options else RMSNorm


def _grouped_attention(config: TransformerConfig, sizes: ModelSizes) -> tuple[ModuleSpec, dict[str, str]]:
    """Return grouped-query attention, and the checkpoint keys of norms that Transformer Engine's spec fuses."""
    norms: tuple[Any, Any] = (
        (norm_of(sizes), norm_of(sizes)) if config.qk_layernorm else (IdentityOp, IdentityOp)
    )
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=BiasedOutput if BIASED_OUTPUT in sizes.options else RowParallelLinear,
        q_layernorm=norms[0],
        k_layernorm=norms[1],
    )
    is_gated = OUTPUT_GATE in sizes.options
    is_wide = WIDE_NORM in sizes.options
    spec = ModuleSpec(
        module=GatedAttention if is_gated else WideNormAttention if is_wide else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=submodules,
    )
    return spec, {} if is_gated else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _latent_attention() -> tuple[ModuleSpec, dict[str, str]]:
    """Return latent attention, and the checkpoint keys of norms that Transformer Engine's spec fuses."""
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=ColumnParallelLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    spec = ModuleSpec(
        module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )
    norms = ("q", "kv")
    return spec, {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in norms
    }


def torch_block_spec(
    config: TransformerConfig, sizes: ModelSizes, virtual_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of a pipeline stage, or of a virtual one, and the final norm."""
    final_norm: Any = norm_of(sizes)  # Megatron annotates it as an instance
    first = get_transformer_layer_offset(config, virtual_stage)
    own = range(first, first + get_num_layers_to_build(config, virtual_stage))
    return TransformerBlockSubmodules(
        layer_specs=[torch_layer_spec(config, sizes, layer) for layer in own], layer_norm=final_norm
    )


def transformer_engine_block_spec(
    config: TransformerConfig, sizes: ModelSizes, virtual_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of Transformer Engine's modules: Megatron's own for a config like this."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual_stage)


BlockSpec = Callable[[TransformerConfig, ModelSizes, int | None], TransformerBlockSubmodules]
BLOCK_SPECS: Mapping[LayerSpecName, BlockSpec] = {
    "torch": torch_block_spec,
    "transformer_engine": transformer_engine_block_spec,
}
