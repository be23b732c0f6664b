"""Defines a model family: the traits of a Hugging Face architecture, without Megatron.

A new family is one file that builds a `ModelFamily`. README.md shows an example, and how to register it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from megatron_dppo.architectures.sizes import WIDE_NORM, HFConfig, ModelSizes, dense_sizes, rope_table
from megatron_dppo.architectures.weight_map import (
    EMBEDDING,
    OUTPUT,
    QK_NORM,
    QKV_BIAS,
    Shape,
    WeightEntry,
    WeightRule,
)
from megatron_dppo.architectures.weight_table import WeightTable
from megatron_dppo.errors import ConversionError, Problem

Variants = Mapping[str, tuple[Any, Any]]
"""Keys of config.json that change the forward pass: transformers' default, and the implemented value."""

SILU_ONLY: Variants = {"hidden_act": ("silu", "silu")}
DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
"""Values that most config classes of transformers give to keys that config.json leaves out."""
_MAY_BE_NULL = frozenset(
    {"head_dim", "num_key_value_heads", "q_lora_rank", "mlp_only_layers", "first_k_dense_replace"}
)
FURTHER_LAYERS = "num_nextn_predict_layers"
"""Key of config.json: number of layers for multi-token prediction after the model's own layers."""
ROPE = "rope_parameters"
"""Key of config.json's table of rotary frequencies, which has an older spelling."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FURTHER_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:eh_proj|enorm|hnorm|shared_head)\.")
_FURTHER_MODULE = re.compile(r"(?:model\.)?(?:mtp(?:_\w+)?|visual)\.")


OTHER_VARIANT = "Use a model of the supported variant; another one would be trained wrongly."
AS_PUBLISHED = "Use a config.json as its publisher wrote it."


def refused(found: str, expected: str, action: str = OTHER_VARIANT) -> Problem:
    """Return the problem of a value in a model's config.json."""
    return Problem("model.load", f"{found} in config.json", expected, action)


def _nothing_more(hf: HFConfig, sizes: ModelSizes) -> Mapping[str, Any]:
    return {}


def _no_problems(hf: HFConfig) -> Iterator[Problem]:
    yield from ()


@dataclass(frozen=True)
class SglangFacts:
    """Facts of SGLang's model class of an architecture.

    Attributes:
        has_dense_layers: Whether it builds `first_k_dense_replace` dense layers before the MoE layers. If not,
            it treats every layer as sparse, loads the tensors that fit, and serves nonsense.
        config_keys: Keys of config.json that it needs and transformers may leave out, with the values that
            training uses. Without them no server starts.
        arguments: Server arguments that apply unless [sglang] sets them.
        derives_head_dim: Whether it uses hidden_size / num_attention_heads as head size and ignores `head_dim`.
        has_plain_rotary: Whether it reads only `rope_theta` of the rotary frequencies. It would silently serve
            other frequencies as plain ones.
        has_own_output: Whether it builds a separate output layer even if config.json ties it to the embedding,
            and loads none from a checkpoint without one. Weight sync then sends the embedding by that name too.
        drops_block_scales: Whether it loads the values of 8-bit floats, but not their block scales.
    """

    has_dense_layers: bool = False
    config_keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    derives_head_dim: bool = False
    has_plain_rotary: bool = False
    has_own_output: bool = False
    drops_block_scales: bool = False


SHARED_EXPERTS_APART: Mapping[str, Any] = {"disable_shared_experts_fusion": True}
"""Arguments for models with shared experts.

On some GPUs, SGLang would otherwise fuse one with the routed experts, as another column of the routes, under
another name.
"""


@dataclass(frozen=True, eq=False)
class ModelFamily:
    """Traits of one architecture.

    Attributes:
        architecture: Name in config.json's `architectures`.
        rules: Weight rules: names, shapes and fusions. They also determine head norms, biases, experts and the
            number of parameters. With tied embeddings, the output layer is left out automatically.
        variants: Keys of config.json with restricted values: any value but the second is refused.
        defaults: Values that transformers' config class gives to keys that config.json leaves out. Tensor
            sizes without a default must be in config.json.
        spellings: Other names of keys that transformers' config class accepts, and the names that are read.
        problems: Function that yields other reasons to refuse a config.json.
        layer_types: Values of `layer_types` in config.json that are implemented.
        rope_types: Types of rotary frequencies that are computed as transformers computes them.
        partial_rotary: Default part of a head that is rotated, if config.json has none. None allows only
            complete heads.
        has_interleaved_stacks: Whether checkpoints stack a layer's experts in tensors of [in, out], gate and up
            in turn, and may store them as MXFP4.
        sizes: Function from a completed config.json to the model's sizes. Callers use `sizes_of`.
        transformer_config: Keywords of Megatron's TransformerConfig that rules and sizes do not determine.
        module_names: Parts of transformers' module names that differ in checkpoints, and their replacements.
        sglang: Facts about SGLang's implementation of the architecture.
    """

    architecture: str
    rules: tuple[WeightRule, ...]
    variants: Variants
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    spellings: Mapping[str, str] = field(default_factory=dict[str, str])
    problems: Callable[[HFConfig], Iterator[Problem]] = lambda hf: iter(())
    layer_types: tuple[str, ...] = ("full_attention",)
    rope_types: tuple[str, ...] = ("default", "llama3")
    partial_rotary: float | None = None
    has_interleaved_stacks: bool = False
    sizes: Callable[[HFConfig], ModelSizes] = dense_sizes
    transformer_config: Callable[[HFConfig, ModelSizes], Mapping[str, Any]] = lambda hf, sizes: {}
    module_names: Mapping[str, str] = field(default_factory=dict[str, str])
    sglang: SglangFacts = field(default_factory=SglangFacts)

    def completed(self, hf: HFConfig) -> dict[str, Any]:
        """Return a config.json, completed with transformers' values of the keys that it leaves out.

        `rope_theta` comes from the table of rotary frequencies if it is there. If a key occurs in two
        spellings, the one in `spellings` is used, and a comparison with the weights shows whether it is right.
        """
        others = {key: hf[other] for other, key in self.spellings.items() if hf.get(other) is not None}
        theta = rope_table(hf).get("rope_theta")
        rope = {} if theta is None else {"rope_theta": theta}
        defaults = {key: value for key, value in self.defaults.items() if key != ROPE or not rope_table(hf)}
        return {**defaults, **rope, **hf, **others}

    def sizes_of(self, hf: HFConfig) -> ModelSizes:
        """Return the sizes in a config.json; KeyError, TypeError or ValueError if one is missing or wrong."""
        return self.sizes(self.completed(hf))

    def key_problems(self, hf: HFConfig) -> Iterator[Problem]:
        """Yield the keys of a config.json that are null, though transformers has another value for them."""
        action = "Use a config.json as its publisher wrote it."
        for key, default in self.defaults.items():
            if default is not None and key in hf and hf[key] is None and key not in _MAY_BE_NULL:
                expected = f"a value such as {default!r}, which transformers takes if the key is left out"
                yield Problem("model.load", f"{key} = null in config.json", expected, action)

    def has_qk_norm(self, sizes: ModelSizes) -> bool:
        """Return whether the heads of queries and keys are normalised."""
        return self._has(QK_NORM, sizes)

    def _has(self, wanted: Iterable[WeightRule], sizes: ModelSizes) -> bool:
        return {rule.megatron for rule in wanted} <= {rule.megatron for rule in self.rules if rule.is_of(sizes)}

    def weight_table(self, hf: HFConfig) -> WeightTable:
        """Return the family's rules with this model's sizes, and the order of its tensors."""
        sizes = self.sizes_of(hf)
        return WeightTable(self.rules, sizes, [entry.name for entry in self.entries(sizes)])

    def entries(self, sizes: ModelSizes) -> Iterator[WeightEntry]:
        """Yield the tensors of an unsplit model once each: embedding, layers, the rest, then all buffers.

        Buffers, which are float32 in a model of any dtype, come last: weights in buckets of one dtype then
        change it once. Rules that travel together are neighbours in each layer.
        """
        entries = list(self._in_order(sizes))
        yield from (entry for entry in entries if not entry.rule.is_buffer)
        yield from (entry for entry in entries if entry.rule.is_buffer)

    def _in_order(self, sizes: ModelSizes) -> Iterator[WeightEntry]:
        outside = [rule for rule in self.rules if not rule.is_in_layers and rule.is_of(sizes)]
        yield from (WeightEntry(rule, None) for rule in outside if rule.megatron == EMBEDDING.megatron)
        for layer in range(sizes.num_layers):
            yield from (WeightEntry(rule, layer) for rule in self.rules if rule.is_in(layer, sizes))
        left_out = {EMBEDDING.megatron} | ({OUTPUT.megatron} if sizes.is_tied else set())
        yield from (WeightEntry(rule, None) for rule in outside if rule.megatron not in left_out)

    def hf_shapes(self, hf: HFConfig) -> dict[str, Shape]:
        """Return the shapes of the Hugging Face checkpoint's tensors by name, one name per expert."""
        sizes, found = self.sizes_of(hf), dict[str, Shape]()
        for entry in self.entries(sizes):
            shapes = entry.rule.hf_shapes(sizes)
            for expert in range(sizes.num_experts or 0) if entry.rule.is_expert else (None,):
                found |= zip(entry.hf_names(expert), shapes, strict=True)
        return found

    def float32_parts(
        self, hf: HFConfig, dtypes: Mapping[str, object], float32: object
    ) -> dict[str, list[str]]:
        """Return the parts that a checkpoint keeps in float32 among weights of another dtype.

        They are parameters whose rules allow it, if they are float32 in all layers. The result has their names
        without layers, and the names of all their tensors.

        Args:
            hf: config.json.
            dtypes: Dtype of each tensor by Hugging Face name, in any notation.
            float32: float32 in this notation.
        """
        found: dict[str, list[str]] = {}
        if set(dtypes.values()) <= {float32}:
            return found
        entries = [entry for entry in self.entries(self.sizes_of(hf)) if entry.rule.may_be_float32]
        others = {entry.rule for entry in entries if {*map(dtypes.get, entry.hf_names())} != {float32}}
        for entry in [entry for entry in entries if entry.rule not in others]:
            for pattern, name in zip(entry.rule.hf, entry.hf_names(), strict=True):
                found.setdefault(pattern.rpartition("{layer}.")[2], []).append(name)
        return found

    def travelling_together(self, hf: HFConfig) -> dict[str, str]:
        """Map each tensor that weight sync must send in one bucket with others to its group's name."""
        return {
            name: f"{entry.rule.travels_with} of layer {entry.layer}"
            for entry in self.entries(self.sizes_of(hf))
            if entry.rule.travels_with is not None
            for name in entry.hf_names()
        }

    def left_out(self, names: Iterable[str], hf: HFConfig) -> frozenset[str]:
        """Return the names of the tensors that are neither trained nor exported.

        They belong to a model's vision, or to layers for multi-token prediction after the model's own layers.
        Such a layer has tensors that no other layer has, so it is recognised whatever
        `num_nextn_predict_layers` is in config.json.
        """
        names, first = list(names), int(hf["num_hidden_layers"])
        marked = {int(match[1]) for match in map(_FURTHER_LAYER.match, names) if match}
        layer_of = {name: match[1] for name in names if (match := _LAYER.match(name))}
        further = {name for name, layer in layer_of.items() if int(layer) >= first and int(layer) in marked}
        return frozenset(further | {name for name in names if _FURTHER_MODULE.match(name)})

    def require_shapes(
        self, hf: HFConfig, found: Mapping[str, Shape], folder: Path, file_of: Callable[[str], Path]
    ) -> None:
        """Compare a checkpoint's tensor names and shapes with its config.json, before any tensor is read."""
        expected = self.hf_shapes(hf)
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        if missing or extra:
            raise ConversionError(
                f"{folder}: {len(missing)} tensors are missing (first: {missing[:3]}) and {len(extra)} are "
                f"left over (first: {extra[:3]}). {self._misfit(hf, missing, extra, found, file_of)}"
            )
        for name, shape in found.items():
            if shape != expected[name]:
                raise ConversionError(
                    f"{file_of(name)}: {name!r} has shape {shape}; expected {expected[name]}. "
                    "The weights are of another config.json."
                )

    def _misfit(
        self,
        hf: HFConfig,
        missing: Sequence[str],
        extra: Sequence[str],
        found: Iterable[str],
        file_of: Callable[[str], Path],
    ) -> str:
        """Return the likely cause of missing and left-over tensors, and what to do."""
        num_layers = int(hf["num_hidden_layers"])
        layers = {int(match[1]) for match in map(_LAYER.match, found) if match}
        if layers and layers != set(range(num_layers)):
            files = f"The files have layers {min(layers)} to {max(layers)}"
            return f"{files}, and config.json has num_hidden_layers = {num_layers}. Download both again."
        stray = {file_of(name).name for name in extra}
        if not missing and stray.isdisjoint(file_of(name).name for name in set(found) - set(extra)):
            return f"No tensor of the model is in {', '.join(sorted(stray))}. Move it to another folder."
        return "The weights are of another config.json."

    def megatron_config(self, hf: HFConfig) -> dict[str, Any]:
        """Return keywords of Megatron's TransformerConfig: RMSNorm, rotary attention, SiLU-gated MLP."""
        hf = self.completed(hf)
        sizes = self.sizes(hf)
        config: dict[str, Any] = dict(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            ffn_hidden_size=sizes.intermediate_size,
            num_attention_heads=sizes.num_attention_heads,
            num_query_groups=sizes.num_key_value_heads,
            kv_channels=sizes.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=hf["rms_norm_eps"],
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=self._has(QKV_BIAS, sizes),
            # With it Megatron sums these norms' gradients over tensor-parallel ranks, which split wide ones.
            qk_layernorm=self.has_qk_norm(sizes) and WIDE_NORM not in sizes.options,
        )
        if any(rule.is_expert for rule in self.rules):
            is_sparse = [int(layer in sizes.moe_layers) for layer in range(sizes.num_layers)]
            config |= dict(
                num_moe_experts=sizes.num_experts,
                moe_ffn_hidden_size=sizes.moe_intermediate_size,
                moe_shared_expert_intermediate_size=sizes.shared_expert_intermediate_size or None,
                moe_layer_freq=1 if all(is_sparse) else is_sparse,
                moe_router_topk=sizes.experts_per_token,
                # Top-k of the logits, then a softmax over them, equals softmax, top-k and renormalisation.
                moe_router_pre_softmax=False,
                moe_router_score_function="softmax",
                moe_router_dtype="fp32",
                moe_router_load_balancing_type="none",
                moe_aux_loss_coeff=0.0,
            )
        return config | dict(self.transformer_config(hf, sizes))
