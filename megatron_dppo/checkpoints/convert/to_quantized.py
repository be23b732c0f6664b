"""Quantises a Hugging Face folder to FP8 or NVFP4: calibrates, writes, measures. Resumes interrupted starts."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_dppo.checkpoints.convert.quantize import Quantization, calibrated, export
from megatron_dppo.checkpoints.convert.unfinished import UnfinishedOutput, fingerprint
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.data.prompts.templates import prompt_tokens
from megatron_dppo.errors import ConfigError, ConversionError, DataError, Problem
from megatron_dppo.run_folder.folder import json_values
from megatron_dppo.run_folder.versions import versions
from megatron_dppo.types import Prompt

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

    Raises:
        ConversionError: The folder's tensors do not match its config.json, or the disk is full.
    """
    tokens = [prompt.to(device) for prompt in prompts]
    output = _unfinished(hf, out, quantization, tokens)
    if not output.file("config.json").is_file():  # else an earlier start got this far
        quantize(hf, output, quantization, tokens, device)
    found = None
    if measure is not None:
        found = measure(hf, output.folder, tokens, max_tokens, device)
        _write_figures(output, found, len(tokens), max_tokens)
    output.publish()
    return found


def tokenized(hf: Path, questions: Sequence[Prompt], num_prompts: int, max_tokens: int) -> list[torch.Tensor]:
    """Return the [P] int64 tokens of the first prompts that are short enough.

    Raises:
        ConfigError: The folder has no tokenizer.
        DataError: No prompt is short enough.
    """
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


def _unfinished(
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
    """Calibrate a model, quantise it and write it.

    Raises:
        ConversionError: The folder's tensors do not match its config.json, or the disk is full.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.bfloat16, trust_remote_code=False, output_loading_info=True
    )
    model, report = loaded
    missing, extra = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing or extra:
        raise ConversionError(
            f"{hf}: {len(missing)} tensors are missing (first: {missing[:3]}) and {len(extra)} are left over "
            f"(first: {extra[:3]}). The weights are of another config.json."
        )
    with tqdm(total=len(tokens), desc="calibrating", unit="prompt") as bar:
        calibrated(model.to(device).eval(), quantization, tokens, bar.update)
    export(model, hf, output, quantization)


def _write_figures(
    output: UnfinishedOutput, found: Mapping[str, float], num_prompts: int, max_tokens: int
) -> None:
    content = {
        "prompts": num_prompts,
        "max_response_tokens": max_tokens,
        "statistics": json_values(found),
        "versions": versions(),
    }
    output.write(MISMATCH, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
