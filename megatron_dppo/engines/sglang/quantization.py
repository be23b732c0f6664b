"""Decides which quantised servers can receive a push, and refuses all others with a reason.

A push replaces the values of a server's parameters, so the parameters must keep the form in which a checkpoint
stores them. In SGLang this holds for unquantised weights, and for a folder of 8-bit floats with block scales
(`checkpoints/block_fp8.py`): a push then sends weights in that form. A server that quantises other weights
replaces its parameters by new ones, which have no loader, and ends at the next push.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_dppo.architectures.family import ModelFamily
from megatron_dppo.architectures.published_names import BLOCK
from megatron_dppo.architectures.registry import (
    FAMILIES,
    QUANTIZED,
    is_mxfp4,
    of_dequantized,
    read_model_sizes,
)
from megatron_dppo.architectures.sizes import ModelSizes, config_file, read_model_config
from megatron_dppo.architectures.weight_map import Shape
from megatron_dppo.checkpoints.block_fp8 import BlockFP8, fused
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem

MODEL_PATH = "model_path"
"""Key of [sglang] that names a folder whose config.json describes the served form of model.load."""
FORM, PLAIN = "fp8", "unquant"
_SELF = "it quantises weights when it loads them and replaces the parameters, so the next push ends the server"
_OTHER = "it serves folders in another form, and no push writes that form"
METHODS: Mapping[str, str] = MappingProxyType(
    {
        FORM: _SELF,  # except for a folder with block scales
        **dict.fromkeys(("mxfp8", "w8a8_fp8", "w8a8_int8", "bitsandbytes", "nvfp4_online"), _SELF),
        **dict.fromkeys(("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed"), _SELF),
        **dict.fromkeys(("quark_int4fp8_moe", "quark_mxfp4", "mxfp4", "humming", "mlx_q4", "mlx_q8"), _SELF),
        **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16", "auto-round"), _OTHER),
        **dict.fromkeys(("auto-round-int8", "compressed-tensors", "gguf", "modelslim", "mxfp_w4a8"), _OTHER),
        **dict.fromkeys(("petit_nvfp4", "quark", "w4afp8", "minimax_m3_nvfp4", "blockwise_int8"), _OTHER),
        PLAIN: "",
    }
)
"""Names of SGLang's methods in 0.5.22 and 0.5.23, and why a server with one cannot get pushes."""
_LOADERS = ("auto", "safetensors", "pt", "dummy", "layered", "fastsafetensors", "npcache", "presharded")
_ALSO_QUANTISE = ("modelopt_quant", "quantize_and_serve", "rl_quant_profile")
KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fp8_gemm_runner_backend": ("triton", "deep_gemm"), "moe_runner_backend": ("triton", "deep_gemm")}
)
"""Kernels for 8-bit weights that keep the parameters as the folder has them; the first is the default."""
_MAY_DIFFER = (QUANTIZED, "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")


def served_folder(config: Config) -> Path:
    """Return the folder whose config.json servers load: sglang.model_path, or the folder of model.load."""
    named = Path(str(config.sglang.get(MODEL_PATH, config.model.load)))
    file = config_file(named)
    return named if file is None else file.parent


def served_form(config: Config) -> BlockFP8 | None:
    """Return the form of the servers' weights, or None if they are not quantised or their folder is missing."""
    folder = served_folder(config)
    return None if config_file(folder) is None else BlockFP8.of(read_model_config(folder)[1])


def kernel_arguments(config: Config) -> dict[str, str]:
    """Return the server arguments that name kernels for the form of the servers' weights."""
    return {} if served_form(config) is None else {name: kernels[0] for name, kernels in KERNELS.items()}


def quantization_problems(config: Config) -> Iterator[Problem]:
    """Yield the reasons why the run's servers cannot get pushes, or would serve another model."""
    table = config.sglang
    try:
        _, own = read_model_config(config.model.load)
        _, served = read_model_config(served_folder(config))
        sizes = read_model_sizes(config.model.load)
    except ConfigError as error:
        if MODEL_PATH in table and config_file(config.model.load) is not None:
            (problem,) = error.problems
            yield Problem(f"sglang.{MODEL_PATH}", problem.found, problem.expected, problem.action)
        return
    form = BlockFP8.of(served)
    if is_mxfp4(served):
        action = "Run megatron-dppo convert to-megatron, then convert to-hf, and name either's folder."
        found = f"{served_folder(config)}, whose experts are MXFP4"
        yield Problem("model.load", found, "bfloat16 weights: a push replaces them", action)
    yield from _method_problems(table, form)
    yield from _other_ways(table)
    if MODEL_PATH in table:
        yield from _folder_problems(str(table[MODEL_PATH]), own, served, form)
    if form is not None:
        yield from _kernel_problems(table)
        yield from _block_problems(table, form, sizes)


def _method_problems(table: Mapping[str, Any], form: BlockFP8 | None) -> Iterator[Problem]:
    method = table.get("quantization")
    if method is None or (method == FORM and form is not None) or (method == PLAIN and form is None):
        return
    expected = "none: the folder's config.json decides"
    reason = METHODS.get(str(method), "it is unknown whether its parameters can be loaded again")
    if method == PLAIN:
        reason = f"the folder's config.json says {FORM}"
    yield Problem(
        "sglang.quantization", f"{method!r}", expected, f"Remove it: {reason}. {_advice(form)}".rstrip()
    )


def _advice(form: BlockFP8 | None) -> str:
    if form is not None:
        return ""
    return (
        "To serve 8-bit floats, run megatron-dppo quantize --format fp8_block, and name its folder as "
        f"sglang.{MODEL_PATH}."
    )


def _other_ways(table: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield arguments other than `quantization` that let a server quantise."""
    loader = str(table.get("load_format", "auto"))
    if loader not in _LOADERS:
        expected = "one of " + ", ".join(_LOADERS)
        yield Problem(
            "sglang.load_format", f"{loader!r}", expected, f"Remove it: {_OTHER}, or streams weights."
        )
    for name in _ALSO_QUANTISE:
        if table.get(name):
            yield Problem(f"sglang.{name}", f"{table[name]!r}", "nothing", f"Remove it: {_SELF}.")


def _folder_problems(
    named: str, own: Mapping[str, Any], served: Mapping[str, Any], form: BlockFP8 | None
) -> Iterator[Problem]:
    where = f"sglang.{MODEL_PATH}"
    if form is None:
        found = f"{named}, whose config.json has no 'fp8' with weight_block_size {[BLOCK, BLOCK]}"
        action = (
            "Remove it: servers then load model.load. To quantise: megatron-dppo quantize --format fp8_block."
        )
        yield Problem(where, found, "a folder of 8-bit floats with block scales", action)
        return
    first, second = of_dequantized(own), of_dequantized(served)
    names = sorted((first.keys() | second.keys()) - set(_MAY_DIFFER))
    different = [name for name in names if first.get(name) != second.get(name)]
    if different:
        found = ", ".join(f"{name} = {second.get(name)!r}" for name in different[:4])
        expected = "model.load's: " + ", ".join(f"{name} = {first.get(name)!r}" for name in different[:4])
        yield Problem(where, f"{named} with {found}", expected, "Quantise model.load.")


def _kernel_problems(table: Mapping[str, Any]) -> Iterator[Problem]:
    for name, kernels in KERNELS.items():
        if table.get(name, kernels[0]) not in kernels:
            action = (
                "Remove it: this kernel, or the one that it chooses, may store other parameters than a push."
            )
            yield Problem(f"sglang.{name}", f"{table[name]!r}", f"one of {', '.join(kernels)}", action)


def served_tensors(family: ModelFamily, sizes: ModelSizes) -> Iterator[tuple[str, Shape, int]]:
    """Yield name, shape and number of copies of each tensor; a layer's experts have one name."""
    for entry in family.entries(sizes):
        is_expert = entry.rule.is_expert
        names = entry.hf_names(0 if is_expert else None)
        for name, shape in zip(names, entry.rule.hf_shapes(sizes), strict=True):
            yield name, shape, (sizes.num_experts or 0) if is_expert else 1


def _block_problems(table: Mapping[str, Any], form: BlockFP8, sizes: ModelSizes) -> Iterator[Problem]:
    """Yield linears that SGLang cannot cut into whole blocks, and fused ones that are quantised in part."""
    family, where = FAMILIES[sizes.architecture], f"sglang.{MODEL_PATH}"
    names = [name for name, *_ in served_tensors(family, sizes)]
    if family.sglang.drops_block_scales:
        found = f"8-bit floats for {sizes.architecture}"
        expected = "another architecture: SGLang loads the values of this one and drops their scales"
        yield Problem(where, found, expected, "Serve the weights in bfloat16.")
    partial = [group for group in fused(names) if len({form.quantizes(name) for name in group}) > 1]
    if partial:
        found = ", ".join(f"{name} {'quantised' if form.quantizes(name) else 'not'}" for name in partial[0])
        action = "Correct modules_to_not_convert in its config.json: name all or none."
        yield Problem(where, found, "all or none: SGLang fuses them", action)
    size, experts_over = (int(table.get(name, 1)) for name in ("tp_size", "ep_size"))
    keys = sizes.num_key_value_heads
    widths = {
        "heads of queries": (sizes.num_attention_heads * sizes.value_head_dim, size, ".self_attn."),
        "heads of keys": (keys * sizes.head_dim, min(size, keys), ".k_proj."),
        "intermediate_size": (sizes.intermediate_size, size, ".mlp.gate_proj."),
        "moe_intermediate_size": (
            sizes.moe_intermediate_size,
            size // math.gcd(size, experts_over),
            ".experts.",
        ),
        "shared experts": (sizes.shared_expert_intermediate_size, size, ".shared_expert"),
    }
    quantised = [name for name in names if form.quantizes(name)]
    for what, (width, parts, part_of_name) in widths.items():
        if any(part_of_name in name for name in quantised) and width % (parts * BLOCK):
            found = f"{size}, which cuts {what} of {width} into parts of {width / parts:g}"
            action = "Lower it, or name these linears in modules_to_not_convert of the folder's config.json"
            action += ", or set sglang.ep_size to the same number." if what.startswith("moe") else "."
            yield Problem("sglang.tp_size", found, f"parts that are multiples of {BLOCK}", action)
