"""Quantises a Hugging Face folder: plans, calibrates, writes, measures.

FP8 and NVFP4 are nvidia-modelopt's. 8-bit floats with block scales ("fp8_block") need no calibration. The same
command resumes an interrupted start.
"""

import importlib.util
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_dppo.architectures.published_names import STACKS, stays_float32
from megatron_dppo.architectures.registry import QUANTIZED, family_of, read_hf_config
from megatron_dppo.architectures.sizes import architecture_of, read_model_config
from megatron_dppo.architectures.weight_map import OUTPUT
from megatron_dppo.checkpoints.block_fp8 import FP8_BLOCK, BlockFP8, QuantizedFormat, fused
from megatron_dppo.checkpoints.convert.output import UnfinishedOutput, disk_errors, fingerprint
from megatron_dppo.checkpoints.hf_folder import HFWeights, write_hf_checkpoint
from megatron_dppo.checkpoints.model_files import copy_model_files
from megatron_dppo.checkpoints.weight_formats import BLOCK, fused_linears, is_linear
from megatron_dppo.data.prompts.templates import prompt_tokens
from megatron_dppo.errors import ConfigError, ConversionError, DataError, Problem
from megatron_dppo.run_folder.folder import json_values
from megatron_dppo.runtime.files import make_readable
from megatron_dppo.runtime.libraries import versions
from megatron_dppo.types import Prompt

_OLDER = "hf_quant_config.json"  # same content as config.json's quantization_config
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class Quantization:
    """Plan of quantising a model: format, and linears left out.

    Attributes:
        weight_format: Format of the linears' weights and inputs.
        excluded: Names of the linears' weights that stay bfloat16, in addition to router, embedding and
            lm_head: the named ones, and for modelopt's formats the projections to and from attention's latents.
        ignored: All modules that stay bfloat16, as inference engines name them: a layer's experts are one.
    """

    weight_format: QuantizedFormat
    excluded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def plan(folder: Path, weight_format: QuantizedFormat, patterns: Sequence[str]) -> Quantization:
    """Plan the quantisation of a folder, reading only headers.

    Args:
        folder: Hugging Face folder of unquantised weights.
        weight_format: Format to quantise to.
        patterns: Shell patterns of linears that stay bfloat16, such as "*.self_attn.*".
    """
    is_modelopts = weight_format != FP8_BLOCK
    if is_modelopts and importlib.util.find_spec("modelopt") is None:
        action = "Install it: pip install 'megatron_dppo[quantize]'."
        raise ConfigError(Problem("nvidia-modelopt", "no such package", "0.47 or later", action))
    if QUANTIZED in read_model_config(folder)[1]:
        found, action = f"{QUANTIZED} in config.json", "Name the original model, in bfloat16."
        raise ConfigError(Problem("--hf", found, "weights that are not quantised", action))
    family = family_of(read_hf_config(folder))
    if family.has_interleaved_stacks or (is_modelopts and family.module_names):
        action = "Quantise it with nvidia-modelopt itself."
        expected = "a family whose checkpoints have the names of transformers' modules, and single experts"
        raise ConfigError(Problem("--hf", architecture_of(read_hf_config(folder)), expected, action))
    shapes = HFWeights(folder).shapes()
    is_quantised = is_linear if is_modelopts else BlockFP8().quantizes
    excluded = _match_excluded([name for name in shapes if is_quantised(name)], patterns)
    excluded |= {
        name for name in shapes if ".self_attn." in name and len(shapes[name]) > 1 and not is_quantised(name)
    }
    for name, shape in shapes.items():
        if weight_format == "nvfp4" and is_linear(name) and name not in excluded and shape[-1] % BLOCK:
            raise ConversionError(
                f"{folder}: {name!r} has {shape[-1]} inputs; expected a multiple of {BLOCK}, NVFP4's block. "
                "Leave it out with --exclude, or use --format fp8."
            )
    matrices = {name for name, shape in shapes.items() if len(shape) > 1}
    kept = {name for name in matrices if not is_quantised(name)} | excluded | {OUTPUT.hf[0]}
    ignored = {_module_of(name) for name in kept}
    return Quantization(weight_format, tuple(sorted(excluded)), tuple(sorted(ignored)))


def _module_of(name: str) -> str:
    prefix, is_expert, _ = name.partition(_EXPERTS)
    return prefix + is_expert.rstrip(".") if is_expert else name.removesuffix(".weight")


def _match_excluded(linears: Sequence[str], patterns: Sequence[str]) -> set[str]:
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
    for group in fused(linears):
        unit = _module_of(group[0]) if _EXPERTS in group[0] else group[0]
        units.setdefault(unit, set()).update(group)
    return units


@torch.no_grad()
def calibrate(
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

    settings: Any = {"fp8": mtq.FP8_DEFAULT_CFG, "nvfp4": mtq.NVFP4_DEFAULT_CFG}[quantization.weight_format]
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
    """
    from modelopt.torch.export import export_hf_checkpoint

    with disk_errors(output.folder), redirect_stdout(sys.stderr):
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=output.folder)
        written = json.loads(output.file("config.json").read_text())[QUANTIZED]
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
    output.write_json(_OLDER, older, indent=2)
    output.write_json("config.json", {**config, QUANTIZED: {**written, "ignore": ignored}}, indent=2)


logger = logging.getLogger(__name__)
MISMATCH = "mismatch.json"
Measure = Callable[[Path, Path, Sequence[torch.Tensor], int, torch.device], dict[str, float]]


def write_quantized(
    hf: Path,
    out: Path,
    quantization: Quantization,
    prompts: Sequence[torch.Tensor],
    *,
    max_tokens: int,
    measure: Measure | None,
    device: torch.device,
) -> dict[str, float] | None:
    """Calibrate and write a quantised folder, and measure its distance from the original.

    Args:
        hf: Original Hugging Face folder.
        out: Folder to create; it appears when it is complete.
        quantization: Plan of the linears to quantise, and their format.
        prompts: [P] int64 each. They calibrate the inputs' scales, and the quantised model responds to them.
        max_tokens: Most tokens of a response.
        measure: Function that measures the folder, such as `analysis.mismatch.quantized.measure`. Without it
            nothing is returned.
        device: Device to compute on.

    Returns:
        Figures that `measure` returns. The file MISMATCH in the folder contains them too.
    """
    tokens = [prompt.to(device) for prompt in prompts]
    output = _open_output(hf, out, quantization, tokens)
    if not output.file("config.json").is_file():  # else an earlier start got this far
        quantize(hf, output, quantization, tokens, device)
    found = None
    if measure is not None:
        found = measure(hf, output.folder, tokens, max_tokens, device)
        counts = {"prompts": len(tokens), "max_response_tokens": max_tokens}
        output.write_json(MISMATCH, {**counts, "statistics": json_values(found), "versions": versions()})
    output.publish()
    return found


def tokenize_prompts(
    hf: Path, questions: Sequence[Prompt], num_prompts: int, max_tokens: int
) -> list[torch.Tensor]:
    """Return the [P] int64 tokens of the first prompts that are short enough."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(hf, trust_remote_code=False)
    except (OSError, ValueError) as error:
        action = "Copy the model's tokenizer files into the folder."
        raise ConfigError(Problem("--hf", f"no tokenizer in {hf} ({error})", "one", action)) from error
    found: list[torch.Tensor] = []
    num_too_long = 0
    for question in questions:
        if len(found) == num_prompts:
            break
        ids = prompt_tokens(
            tokenizer, question.text, question.messages, question.tools, question.template_arguments
        )
        if 1 <= len(ids) <= max_tokens:
            found.append(torch.tensor(ids))
        else:
            num_too_long += 1
    if not found:
        raise DataError(
            f"--prompts: found {num_too_long} prompts, none of 1 to {max_tokens} tokens; expected some. Raise "
            "--max-tokens."
        )
    logger.info("%d prompts; %d were longer than %d tokens", len(found), num_too_long, max_tokens)
    return found


def _open_output(
    hf: Path, out: Path, quantization: Quantization, tokens: Sequence[torch.Tensor]
) -> UnfinishedOutput:
    """Open the output under its unfinished name, with the files of an interrupted start of the same command."""
    weights = HFWeights(hf)
    content = {
        "from": fingerprint(weights.files),
        "format": quantization.weight_format,
        "excluded": quantization.excluded,
        "prompts": [prompt.tolist() for prompt in tokens],
    }
    num_values = sum(torch.Size(shape).numel() for shape in weights.shapes().values())
    return UnfinishedOutput(out, json.loads(json.dumps(content)), num_values)


def quantize(
    hf: Path,
    output: UnfinishedOutput,
    quantization: Quantization,
    tokens: Sequence[torch.Tensor],
    device: torch.device,
) -> None:
    """Calibrate a model unless its format needs no calibration, quantise it and write it."""
    if quantization.weight_format == FP8_BLOCK:
        _write_blocks(hf, output, BlockFP8(quantization.ignored), device)
        return
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.bfloat16, trust_remote_code=False, output_loading_info=True
    )
    model, report = loaded
    missing, extra = report["missing_keys"], report["unexpected_keys"]
    _require_complete(hf, missing, extra)
    with tqdm(total=len(tokens), desc="calibrating", unit="prompt") as bar:
        calibrate(model.to(device).eval(), quantization, tokens, bar.update)
    export(model, hf, output, quantization)


def _require_complete(hf: Path, missing: Iterable[str], extra: Iterable[str]) -> None:
    missing, extra = sorted(missing), sorted(extra)
    if missing or extra:
        raise ConversionError(
            f"{hf}: {len(missing)} tensors are missing (first: {missing[:3]}) and {len(extra)} are left over "
            f"(first: {extra[:3]}). The weights are of another config.json."
        )


def _write_blocks(hf: Path, output: UnfinishedOutput, form: BlockFP8, device: torch.device) -> None:
    """Write 8-bit floats with block scales, one tensor at a time; config.json last, as `export` does."""
    weights, written, config = HFWeights(hf), output.file("written"), read_hf_config(hf)
    expected = family_of(config).hf_shapes(config).keys()
    _require_complete(hf, expected - weights.names, weights.names - expected)
    tensors = ((name, weights.tensor(name).to(device)) for name in sorted(weights.names))
    parts = family_of(config).float32_parts(config, weights.dtypes(), "F32")
    kept = {name for names in parts.values() for name in names} | set(filter(stays_float32, weights.names))
    in_bfloat16 = ((name, t if name in kept else t.bfloat16()) for name, t in tensors)
    shutil.rmtree(written, ignore_errors=True)
    with disk_errors(output.folder):
        write_hf_checkpoint(form.quantized(in_bfloat16), written, hf)
        config = json.loads((written / "config.json").read_text())
        (written / "config.json").unlink()
        for file in written.iterdir():
            file.rename(output.file(file.name))
        written.rmdir()
    output.write_json("config.json", {**config, QUANTIZED: form.described()}, indent=2)
