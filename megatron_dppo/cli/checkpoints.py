"""Commands of `megatron-dppo` for whole checkpoints: convert, with its sub-commands, and quantize."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from tqdm import tqdm

from megatron_dppo.checkpoints.block_fp8 import FP8_BLOCK, QuantizedFormat
from megatron_dppo.cli.options import user_errors
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.units import parse_bytes
from megatron_dppo.runtime import process as runtime

if TYPE_CHECKING:  # so that --help loads none of it
    from megatron_dppo.checkpoints.convert.output import WriteOptions
    from megatron_dppo.checkpoints.convert.sources import WeightSource

logger = logging.getLogger(__name__)
app = typer.Typer()
convert = typer.Typer(
    name="convert",
    help="""Convert checkpoints between Hugging Face and Megatron-Core, bit for bit, a piece at a time.

    \b
        megatron-dppo convert to-megatron --hf Qwen3-30B-A3B --out Qwen3-30B-A3B-megatron
        megatron-dppo convert to-hf --megatron runs/a/checkpoints/step_00000100 --out trained
        megatron-dppo convert verify Qwen3-30B-A3B Qwen3-30B-A3B-megatron

    One process, or several under torchrun, which divide the work. All must see the folders:

        torchrun --nproc-per-node 4 -m megatron_dppo convert to-megatron --hf MODEL --out MODEL-megatron

    Run the same command again to resume a conversion. Exit code 2: invalid arguments.
    """,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(convert)

Out = Annotated[Path, typer.Option(help="Folder to write; must not exist.")]
HuggingFace = Annotated[Path, typer.Option(help="Hugging Face folder: config.json, safetensors, tokenizer.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Output type: float32 or bfloat16 (rounds). [default: the checkpoint's]"),
]
ShardSize = Annotated[str, typer.Option(help="Maximum file size, such as 500MB or 4GiB.")]
Writers = Annotated[int, typer.Option(min=1, help="Files that a process writes concurrently.")]


@convert.command()
def to_megatron(
    hf: HuggingFace, out: Out, dtype: Dtype = None, shard_size: ShardSize = "4GiB", writers: Writers = 2
) -> None:
    """Hugging Face -> Megatron. Any parallel layout loads the result."""
    with _writing(out) as this:
        from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource
        from megatron_dppo.checkpoints.convert.to_megatron import write_megatron
        from megatron_dppo.checkpoints.hf_folder import HFWeights
        from megatron_dppo.checkpoints.model_files import read_convertible_config

        with _named("--hf"):
            config = read_convertible_config(hf)
        source = HuggingFaceSource(HFWeights(hf, 2 * writers))
        if source.weights.ignored:
            logger.info("not read: %s", ", ".join(source.weights.ignored))
        if source.weights.left_out:
            logger.info(
                "left out: %d tensors, of vision or of further tokens' layers (first: %s); config.json will "
                "say that there are none",
                *(len(source.weights.left_out), min(source.weights.left_out)),
            )
        with _options(source, this, dtype, shard_size, writers) as options:
            write_megatron(source, config, out, options, this)


@convert.command()
def to_hf(
    megatron: Annotated[
        Path, typer.Option(help="Megatron checkpoint, converted or from a run's checkpoints/.")
    ],
    out: Out,
    hf_template: Annotated[
        Path | None,
        typer.Option(help="Folder, of either kind, to take config and tokenizer from. [default: MEGATRON]"),
    ] = None,
    dtype: Dtype = None,
    shard_size: ShardSize = "4GiB",
    writers: Writers = 1,
) -> None:
    """Megatron -> Hugging Face, with published names, as transformers and SGLang read it; LoRA is merged."""
    with _writing(out) as this:
        from megatron_dppo.checkpoints.convert.sources import MegatronSource, base_of
        from megatron_dppo.checkpoints.convert.to_hf import model_card, write_hf
        from megatron_dppo.checkpoints.model_files import description_of

        with _named("--megatron" if hf_template is None else "--hf-template"):
            hf, template = description_of(hf_template or megatron)
        source = MegatronSource(megatron, hf)
        base = base_of(megatron, source) if dtype is not None else None
        with _options(source, this, dtype, shard_size, writers, base) as options:
            write_hf(source, template, out, options, this, model_card(megatron, out.name))


@convert.command()
def to_adapter(
    megatron: Annotated[Path, typer.Option(help="Megatron checkpoint of a LoRA run's checkpoints/.")],
    out: Out,
    base: Annotated[
        str,
        typer.Option(
            help="Name or folder of the base model, for the adapter's config. [default: the run's model.load]"
        ),
    ] = "",
) -> None:
    """LoRA's adapters of a Megatron checkpoint -> a folder that peft, SGLang and vLLM read."""
    with _writing(out):
        from megatron_dppo.checkpoints.convert.peft_adapter import write_peft_adapter

        write_peft_adapter(megatron, out, base)


@convert.command()
def merge_adapter(
    hf: HuggingFace,
    adapter: Annotated[Path, typer.Option(help="LoRA adapter in peft's format.")],
    out: Out,
    dtype: Dtype = None,
    shard_size: ShardSize = "4GiB",
    writers: Writers = 1,
) -> None:
    """Hugging Face + a peft LoRA adapter -> Hugging Face, with the sums that peft's own merge gives."""
    with _writing(out) as this:
        from megatron_dppo.checkpoints.convert.peft_adapter import MergedSource
        from megatron_dppo.checkpoints.convert.to_hf import write_hf
        from megatron_dppo.checkpoints.hf_folder import HFWeights
        from megatron_dppo.checkpoints.model_files import read_convertible_config

        with _named("--hf"):
            read_convertible_config(hf)
        source = MergedSource(HFWeights(hf, 2 * writers), adapter)
        with _options(source, this, dtype, shard_size, writers) as options:
            write_hf(source, hf, out, options, this)


@convert.command()
def upcycle(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder of a dense Llama, Mistral, Qwen2 or Qwen3.")],
    out: Out,
    experts: Annotated[int, typer.Option(min=2, help="Experts in each layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts that process a token; at least 2.")] = 2,
    noise: Annotated[
        float, typer.Option(min=0, help="Gaussian noise of each expert, in standard deviations of a tensor.")
    ] = 0.0,
    reinit: Annotated[
        float, typer.Option(min=0, max=1, help="Fraction of each expert's features that are drawn again.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of routers, noise and drawn features.")] = 0,
    shard_size: ShardSize = "4GiB",
    writers: Writers = 1,
) -> None:
    """Dense Hugging Face folder -> Mixture of Experts. Each expert starts as a copy of the feed-forward.

        megatron-dppo convert upcycle --hf Qwen3-0.6B --out Qwen3-8x0.6B --experts 8 --top-k 2

    Llama and Mistral become Mixtral, Qwen2 becomes Qwen2-MoE, and Qwen3 becomes Qwen3-MoE. The other weights,
    tokenizer and chat template stay. Routers are small and random.

    Without --noise and --reinit, the logits are the dense model's: the weights of the chosen experts sum to 1,
    and all experts are equal. They become different only by training on different tokens.

    --noise 0.05 starts them a little different. --reinit 0.5 draws half of each expert's intermediate features
    again, which pays in long training and harms the model until then (Drop-Upcycling, arXiv 2502.19261).
    Memory: --shard-size per writer. The output is about --experts times as large as the input.
    """
    with _writing(out) as this:
        import json

        from megatron_dppo.checkpoints.convert import upcycle as upcycling
        from megatron_dppo.checkpoints.convert.to_hf import write_hf
        from megatron_dppo.checkpoints.hf_folder import HFWeights

        how = upcycling.Upcycling(experts, top_k, noise, reinit, seed)
        with _named("--hf"):
            dense = upcycling.read_dense_config(hf)
        config = upcycling.moe_config(dense, how)
        source = upcycling.UpcycledSource(HFWeights(hf, 2 * writers), dense, how)
        card = upcycling.model_card(hf, config, how)
        texts = {"config.json": json.dumps(config, indent=2) + "\n", "README.md": card}
        with _options(source, this, None, shard_size, writers) as options:
            write_hf(source, hf, out, options, this, texts)


@convert.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder or Megatron checkpoint.")],
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
) -> None:
    """Show a checkpoint's type and contents, without reading tensors."""
    with user_errors(), _named("FOLDER"):
        from megatron_dppo.checkpoints.convert.inspect import contents_of

        for line in contents_of(folder, is_listing=tensors):
            typer.echo(line)


@convert.command()
def verify(
    first: Annotated[Path, typer.Argument(help="Hugging Face folder or Megatron checkpoint.")],
    second: Annotated[Path, typer.Argument(help="The other one, of either kind.")],
) -> None:
    """Compare two checkpoints bit for bit by Hugging Face name. Exit code 1: they differ."""
    with user_errors():
        from megatron_dppo.checkpoints.convert.inspect import compare
        from megatron_dppo.checkpoints.convert.sources import source_of

        pair = source_of(first), source_of(second)
        with _progress(pair[0], 1) as on_bytes:
            found = compare(*pair, on_bytes)
    for name in found.only_first:
        typer.echo(f"only in {first}: {name}")
    for name in found.only_second:
        typer.echo(f"only in {second}: {name}")
    for line in found.different:
        typer.echo(f"different: {line}")
    typer.echo(f"{found.num_equal} tensors are equal, bit for bit")
    if not found.is_equal:
        raise typer.Exit(1)


@app.command()
def quantize(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder to quantise.")],
    out: Out,
    weight_format: Annotated[QuantizedFormat, typer.Option("--format", help="Format of weights and inputs.")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="A .jsonl or .parquet file of prompts; fp8_block with --no-measure needs none."),
    ] = None,
    prompt_column: Annotated[str, typer.Option(help="Value of data.prompt_column.")] = "prompt",
    answer_column: Annotated[str, typer.Option(help="Value of data.answer_column.")] = "answer",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to calibrate and measure with.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a prompt and of a response.")] = 512,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help='Linear layers to skip, such as "*.self_attn.*".'),
    ] = None,
    measure: Annotated[bool, typer.Option(help="Measure the mismatch with the original.")] = True,
    device: Annotated[str | None, typer.Option(help="Device. [default: a GPU if there is one]")] = None,
) -> None:
    """Quantise a checkpoint to FP8 or NVFP4, and measure the mismatch.

        megatron-dppo quantize --format nvfp4 --hf MODEL --out MODEL-nvfp4 --prompts prompts.jsonl
        megatron-dppo quantize --format fp8_block --hf MODEL --out MODEL-fp8 --no-measure

    fp8 and nvfp4 are nvidia-modelopt's formats. fp8_block has one scale per block of 128 x 128 weights, needs
    no calibration, and is the form of weights that a run can push to SGLang servers (sglang.model_path).

    Linears are quantised, weights and inputs; embedding, routers and lm_head stay bfloat16, and so do the
    linears that --exclude names. The first --num-prompts prompts of at most --max-tokens tokens calibrate the
    inputs' scales. The prompt file is one that data.prompts takes.

    The output has the original's config.json with a quantization_config, its tokenizer and its
    generation_config.json: SGLang takes the format from there. Training starts from the original: a quantised
    folder is for inference.

    Then the folder is read back and measured. The quantised model mu samples a response to each prompt, and mu
    and the original model pi forward it. The table and mismatch.json report |pi - mu|, the KL, the tails of
    pi / mu, and the fractions of equal most probable tokens and of equal experts. Weights and inputs are
    rounded to the format and multiplied in bfloat16, unlike in an engine's kernel.
    """
    with _process() as this:
        from megatron_dppo.analysis.mismatch.quantized import measure as distance
        from megatron_dppo.checkpoints.convert.output import refuse_existing
        from megatron_dppo.checkpoints.convert.quantize import plan, tokenize_prompts, write_quantized
        from megatron_dppo.data.prompts.prompts import load_prompts

        refuse_existing(out)
        if prompts is None and (measure or weight_format != FP8_BLOCK):
            action = "Name one, or use --format fp8_block with --no-measure."
            raise ConfigError(Problem("--prompts", "none", "a file of prompts", action))
        questions = None if prompts is None else load_prompts(prompts, prompt_column, answer_column)
        with _named("--hf"):
            quantization = plan(hf, weight_format, exclude or ())
        tokens = [] if questions is None else tokenize_prompts(hf, questions, num_prompts, max_tokens)
        place = torch.device(device) if device else this.device
        compare = distance if measure else None
        found = write_quantized(
            hf, out, quantization, tokens, max_tokens=max_tokens, measure=compare, device=place
        )
    if found is not None:
        _show_mismatch(found, len(tokens))
    typer.echo(f"wrote {out}")


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


def _show_mismatch(found: Mapping[str, float], num_responses: int) -> None:
    from megatron_dppo.analysis.pages import show_table

    layers = [name for name in found if name.startswith("agreement_layer_")]
    rows = [*_ROWS, *((f"experts agreed on, layer {n.rpartition('_')[2]}", n, "{:.4%}") for n in layers)]
    title = f"quantised against original: {int(found['num_tokens']):,} tokens of {num_responses} responses"
    show_table(title, ["", "value"], [[label, form.format(found[name])] for label, name, form in rows])


@contextmanager
def _process() -> Iterator[runtime.Runtime]:
    """Start the runtime, with or without torchrun; handle user errors and silence libraries."""
    with user_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        this = runtime.start(num_threads=torch.get_num_threads())
        try:
            yield this
        finally:
            runtime.stop()


@contextmanager
def _writing(out: Path) -> Iterator[runtime.Runtime]:
    """Refuse an output that exists, start this process, and log that the body wrote it."""
    with _process() as this:
        from megatron_dppo.checkpoints.convert.output import refuse_existing

        refuse_existing(out)
        yield this
        logger.info("wrote %s", out)


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Let problems with a model folder, which call it model.load, name the option that gave it."""
    try:
        yield
    except ConfigError as error:
        if not error.problems:
            raise
        named = [replace(p, where=option) if p.where == "model.load" else p for p in error.problems]
        raise ConfigError(named) from None


@contextmanager
def _progress(source: "WeightSource", num_sharers: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar of bytes with the remaining time, and yield the function that advances it.

    Args:
        source: What is converted or compared.
        num_sharers: Processes that share the work. The bar shows one process's share; 0 shows no bar.
    """
    total = sum(tensor.nbytes for tensor in source.outline().values()) // max(num_sharers, 1)
    with tqdm(total=total, unit="B", unit_scale=True, desc=source.folder.name, disable=not num_sharers) as bar:
        yield bar.update


@contextmanager
def _options(
    source: "WeightSource",
    this: runtime.Runtime,
    dtype: str | None,
    shard_size: str,
    writers: int,
    base: "WeightSource | None" = None,
) -> Iterator["WriteOptions"]:
    """Yield the options of a conversion, and log the loss of a rounding at its end."""
    from megatron_dppo.checkpoints.convert.output import Loss, Rounding, WriteOptions, dtype_of

    rounded, file_bytes = dtype_of(dtype), parse_bytes(shard_size, "--shard-size")
    with _progress(source, this.world_size if this.is_main else 0) as on_bytes:
        options = WriteOptions(rounded, file_bytes, writers, on_bytes, Rounding(base))
        yield options
    if rounded is not None:
        loss = Loss()
        for of_rank in this.all_gather(options.rounding.loss):
            loss.add(of_rank)
        for line in loss.lines(rounded, None if base is None else base.folder):
            logger.info(line)
