"""Quantise a Hugging Face checkpoint to FP8 or NVFP4 with nvidia-modelopt, and measure what that changes.

    python tools/quantize_checkpoint.py --format nvfp4 --hf MODEL --out MODEL-nvfp4 --prompts prompts.jsonl

Linears are quantised, weights and inputs; embedding, routers and lm_head stay bfloat16, and so do the linears
that --exclude names. The first --num-prompts prompts of at most --max-tokens tokens calibrate the inputs'
scales. The prompt file is one that data.prompts takes.

The output has the original's config.json with a quantization_config, its tokenizer and its
generation_config.json: SGLang takes the format from there. Training starts from the original: a quantised
folder is for inference.

Then the folder is read back and measured: mu, the quantised model, answers each prompt, and both it and the
original, pi, forward the answers. The table and mismatch.json in the folder hold |pi - mu|, the KL, the tails
of pi / mu, the share of positions whose most probable token is the same, and of experts that both choose.
Weights and inputs are rounded as the format says and multiplied in bfloat16, which no engine's kernel does.
"""

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarking import cli, show_table
from tqdm import tqdm

from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.conversion.quantize import Quantization, calibrated, export, plan
from megatron_dppo.conversion.unfinished import UnfinishedOutput, fingerprint, refuse_existing
from megatron_dppo.data.prompts.prompts import load_prompts
from megatron_dppo.errors import ConfigError, ConversionError, DataError, MegatronDppoError, Problem
from megatron_dppo.rollout.embedded.weight_formats import WeightFormat
from megatron_dppo.run_folder.folder import json_number
from megatron_dppo.run_folder.versions import versions
from megatron_dppo.runtime import process as runtime
from megatron_dppo.types import Prompt

logger = logging.getLogger("megatron_dppo.tools.quantize_checkpoint")
MISMATCH = "mismatch.json"
_ROWS: Sequence[tuple[str, str, str]] = (
    ("|pi - mu| of a token, mean", "abs_prob_diff_mean", "{:.3e}"),
    ("  99th percentile", "tv_p99", "{:.3e}"),
    ("  99.9th percentile", "tv_p999", "{:.3e}"),
    ("  largest", "tv_max", "{:.3e}"),
    ("KL(mu || pi), k1", "kl_k1", "{:+.3e}"),
    ("  k3", "kl_k3", "{:.3e}"),
    ("pi / mu, smallest", "ratio_min", "{:.6g}"),
    ("  1st percentile", "ratio_p01", "{:.6g}"),
    ("  99th percentile", "ratio_p99", "{:.6g}"),
    ("  largest", "ratio_max", "{:.6g}"),
    ("most probable token the same", "top1_agreement", "{:.4%}"),
)


def main(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder to quantise.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    prompts: Annotated[Path, typer.Option(help="A .jsonl or .parquet file of prompts.")],
    weight_format: Annotated[WeightFormat, typer.Option("--format", help="Of weights and inputs.")],
    prompt_column: Annotated[str, typer.Option(help="As data.prompt_column.")] = "prompt",
    answer_column: Annotated[str, typer.Option(help="As data.answer_column.")] = "answer",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to calibrate and measure with.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a prompt, and of a response.")] = 512,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help='Linears to leave, as "*.self_attn.*".')
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure the mismatch with the original.")] = True,
    device: Annotated[str | None, typer.Option(help="[default: a GPU where there is one]")] = None,
) -> None:
    """Quantise a checkpoint."""
    try:
        refuse_existing(out)
        questions = load_prompts(prompts, prompt_column, answer_column)
        quantization = plan(hf, weight_format, exclude or ())
        tokens = tokenized(hf, questions, num_prompts, max_tokens)
        this = runtime.start(num_threads=torch.get_num_threads())
        place = torch.device(device) if device else this.device
        tokens = [prompt.to(place) for prompt in tokens]
        output = unfinished(hf, out, quantization, tokens)
        if not output.file("config.json").is_file():  # else an earlier start got this far
            quantize(hf, output, quantization, tokens, place)
        if measure:
            measured(hf, output, tokens, max_tokens, place)
        output.publish()
        typer.echo(f"wrote {out}")
    except MegatronDppoError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
    finally:
        runtime.stop()


def tokenized(hf: Path, questions: Sequence[Prompt], num_prompts: int, max_tokens: int) -> list[torch.Tensor]:
    """[P] int64 of the first prompts that are short enough.

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
        ids = _token_ids(tokenizer, question)
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


def _token_ids(tokenizer: Any, question: Prompt) -> list[int]:
    if question.text is not None:
        return tokenizer.encode(question.text, add_special_tokens=True)
    return tokenizer.apply_chat_template(
        list(question.messages or ()), add_generation_prompt=True, tokenize=True, return_dict=False
    )


def unfinished(
    hf: Path, out: Path, quantization: Quantization, tokens: Sequence[torch.Tensor]
) -> UnfinishedOutput:
    """The output under its other name, with what an interrupted start of the same command left in it."""
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
    """Calibrate and write.

    Raises:
        ConversionError: The folder has more or less than its config.json says, or the disk is full.
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


def measured(
    hf: Path,
    output: UnfinishedOutput,
    tokens: Sequence[torch.Tensor],
    max_tokens: int,
    device: torch.device,
) -> None:
    """Measure the written folder, show the table, and write it down."""
    from quantize_mismatch import measure

    found = measure(hf, output.folder, tokens, max_tokens, device)
    content = {
        "prompts": len(tokens),
        "max_response_tokens": max_tokens,
        "statistics": {name: json_number(value) for name, value in found.items()},
        "versions": versions(),
    }
    output.write(MISMATCH, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
    show_table(*_table(found, len(tokens)))


def _table(found: Mapping[str, float], num_responses: int) -> tuple[str, list[str], list[list[str]]]:
    layers = [name for name in found if name.startswith("agreement_layer_")]
    rows = [*_ROWS, *((f"experts agreed on, layer {n.rpartition('_')[2]}", n, "{:.4%}") for n in layers)]
    title = f"quantised against original: {int(found['num_tokens']):,} tokens of {num_responses} responses"
    return title, ["", "value"], [[label, form.format(found[name])] for label, name, form in rows]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    cli(main, __doc__)
