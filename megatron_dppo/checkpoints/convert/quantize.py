"""Quantises a Hugging Face folder to FP8 or NVFP4, with nvidia-modelopt's calibration and export."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.architectures.published_names import STACKS
from megatron_dppo.architectures.refusals import QUANTIZED
from megatron_dppo.architectures.registry import family_of, read_hf_config
from megatron_dppo.architectures.sizes import architecture_of, read_model_config
from megatron_dppo.architectures.weight_map import OUTPUT
from megatron_dppo.checkpoints.convert.quantized_folder import QUANTIZATION
from megatron_dppo.checkpoints.convert.unfinished import UnfinishedOutput, disk_errors
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.model_files import copy_model_files
from megatron_dppo.checkpoints.weight_formats import BLOCK, WeightFormat, fused_linears, is_linear
from megatron_dppo.errors import ConfigError, ConversionError, Problem
from megatron_dppo.runtime.files import make_readable

_OLDER = "hf_quant_config.json"  # same content as config.json's quantization_config
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class Quantization:
    """Plan of quantising a model: format, and linears left out.

    Attributes:
        weight_format: Format of the linears' weights and inputs.
        excluded: Names of the linears' weights that stay bfloat16, in addition to router, embedding and
            lm_head: the named ones, and the projections to and from attention's latents.
        ignored: All modules that stay bfloat16, as inference engines name them: a layer's experts are one.
    """

    weight_format: WeightFormat
    excluded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def plan(folder: Path, weight_format: WeightFormat, patterns: Sequence[str]) -> Quantization:
    """Plan the quantisation of a folder, reading only headers.

    Args:
        folder: Hugging Face folder of unquantised weights.
        weight_format: Format to quantise to.
        patterns: Shell patterns of linears that stay bfloat16, such as "*.self_attn.*".

    Raises:
        ConfigError: modelopt is not installed, the architecture is not supported, the weights are quantised
            already, or a pattern matches nothing or only some of the linears that inference engines fuse.
        ConversionError: The folder is torn, or NVFP4's blocks do not divide a linear.
    """
    if importlib.util.find_spec("modelopt") is None:
        action = "Install it: pip install 'megatron_dppo[quantize]'."
        raise ConfigError(Problem("nvidia-modelopt", "no such package", "0.47 or later", action))
    if QUANTIZED in read_model_config(folder)[1]:
        found, action = f"{QUANTIZED} in config.json", "Name the original model, in bfloat16."
        raise ConfigError(Problem("--hf", found, "weights that are not quantised", action))
    if family_of(read_hf_config(folder)).module_names:
        action = "Quantise it with nvidia-modelopt itself."
        expected = "a family whose checkpoints have the names of transformers' modules"
        raise ConfigError(Problem("--hf", architecture_of(read_hf_config(folder)), expected, action))
    shapes = HFWeights(folder).shapes()
    excluded = _excluded([name for name in shapes if is_linear(name)], patterns)
    excluded |= {
        name for name in shapes if ".self_attn." in name and len(shapes[name]) > 1 and not is_linear(name)
    }
    for name, shape in shapes.items():
        if weight_format == "nvfp4" and is_linear(name) and name not in excluded and shape[-1] % BLOCK:
            raise ConversionError(
                f"{folder}: {name!r} has {shape[-1]} inputs; expected a multiple of {BLOCK}, NVFP4's block. "
                "Leave it out with --exclude, or use --format fp8."
            )
    matrices = {name for name, shape in shapes.items() if len(shape) > 1}
    kept = {name for name in matrices if not is_linear(name)} | excluded | {OUTPUT.hf[0]}
    ignored = {_module_of(name) for name in kept}
    return Quantization(weight_format, tuple(sorted(excluded)), tuple(sorted(ignored)))


def _module_of(name: str) -> str:
    prefix, is_expert, _ = name.partition(_EXPERTS)
    return prefix + is_expert.rstrip(".") if is_expert else name.removesuffix(".weight")


def _excluded(linears: Sequence[str], patterns: Sequence[str]) -> set[str]:
    def matches(pattern: str) -> set[str]:
        return {name for name in linears if fnmatchcase(name.removesuffix(".weight"), pattern)}

    problems = [
        Problem(
            "--exclude", f"{pattern!r}, which matches no linear", f"one as {linears[0]!r} has", "Correct it."
        )
        for pattern in patterns
        if not matches(pattern)
    ]
    excluded = {name for pattern in patterns for name in matches(pattern)}
    for unit in _units(linears).values():
        if excluded & unit and not unit <= excluded:
            found = f"{min(excluded & unit)}, and not {min(unit - excluded)}"
            action = "Inference engines fuse them: exclude all or none."
            problems.append(Problem("--exclude", found, "both or neither", action))
            break
    if problems:
        raise ConfigError(problems)
    return excluded


def _units(linears: Iterable[str]) -> dict[str, set[str]]:
    """Group weights that must be quantised together: fused linears, a layer's experts."""
    units: dict[str, set[str]] = {}
    for group in fused_linears(linears):
        unit = _module_of(group[0]) if _EXPERTS in group[0] else group[0]
        units.setdefault(unit, set()).update(group)
    return units


@torch.no_grad()
def calibrated(
    model: Any, quantization: Quantization, prompts: Iterable[Tensor], on_prompt: Callable[[], Any]
) -> None:
    """Insert modelopt's quantisers into a transformers model, calibrated on the prompts.

    Args:
        model: Model in bfloat16. It is changed in place, and computes with rounded numbers afterwards.
        quantization: Plan of what to quantise.
        prompts: [tokens] int64 each, on the model's device.
        on_prompt: Callback after each prompt.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    settings = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}[quantization.weight_format]
    disabled = [{"quantizer_name": name, "enable": False} for name in _quantizers(quantization.excluded)]

    def forward_all(quantized: Any) -> None:
        for tokens in prompts:
            quantized(input_ids=tokens.unsqueeze(0), use_cache=False)
            on_prompt()

    with redirect_stdout(sys.stderr):
        mtq.quantize(model, {**settings, "quant_cfg": [*settings["quant_cfg"], *disabled]}, forward_all)
        names = {name for name, _ in model.named_modules()}
        quantized = [f"{n}.weight" for n in names if f"{n}.weight" not in quantization.excluded]
        for group in fused_linears(sorted(quantized)):  # experts' share theirs already
            preprocess_linear_fusion([model.get_submodule(n.removesuffix(".weight")) for n in group])


def _quantizers(linears: Iterable[str]) -> list[str]:
    """Return patterns of modelopt's quantisers for these linears."""
    found: set[str] = set()
    for name in linears:
        prefix, is_expert, _ = name.partition(_EXPERTS)
        if is_expert:
            found |= {f"{prefix}{_EXPERTS}{fused}_*" for fused in STACKS}
        else:
            found.add(name.removesuffix("weight") + "*")
    return sorted(found)


def export(model: Any, template: Path, output: UnfinishedOutput, quantization: Quantization) -> None:
    """Write a folder that SGLang reads; config.json is written last, to mark completeness.

    Args:
        model: Calibrated model; unusable afterwards.
        template: Folder whose config, tokenizer and licence are copied. config.json keeps its keys, and gets
            `quantization_config` and the dtype of the unquantised weights.
        output: Folder to write to.
        quantization: Plan that the model was calibrated for.

    Raises:
        ConversionError: The disk is full.
    """
    from modelopt.torch.export import export_hf_checkpoint

    with disk_errors(output.folder), redirect_stdout(sys.stderr):
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=output.folder)
        written = json.loads(output.file("config.json").read_text())[QUANTIZATION]
        older = json.loads(output.file(_OLDER).read_text())
        output.file("config.json").unlink()
        output.file("generation_config.json").unlink(missing_ok=True)  # the template's, if it has one
        make_readable(output.folder)
        copy_model_files(template, output.folder)
    config = json.loads(output.file("config.json").read_text())
    config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
    # modelopt shortens names to patterns, as model.layers.1*, which would leave out layer 10 too
    ignored = list(quantization.ignored)
    older["quantization"]["exclude_modules"] = ignored
    _write_json(output, _OLDER, older)
    _write_json(output, "config.json", {**config, QUANTIZATION: {**written, "ignore": ignored}})


def _write_json(output: UnfinishedOutput, name: str, content: Mapping[str, Any]) -> None:
    output.write(name, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))
