"""Convert checkpoints between Hugging Face and Megatron-Core, bit for bit, a piece at a time.

python tools/convert_checkpoint.py to-megatron --hf Qwen3-30B-A3B --out Qwen3-30B-A3B-megatron
python tools/convert_checkpoint.py to-hf --megatron runs/run/checkpoints/step_00000100 --out trained
python tools/convert_checkpoint.py verify Qwen3-30B-A3B Qwen3-30B-A3B-megatron

One process, or several under torchrun, which then share the work; the folders must be seen by all.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.conversion.compare import compare
from megatron_dppo.conversion.contents import contents_of
from megatron_dppo.conversion.description import read_convertible_config
from megatron_dppo.conversion.options import Options
from megatron_dppo.conversion.peft_adapter import MergedSource
from megatron_dppo.conversion.sources import HuggingFaceSource, MegatronSource, Source
from megatron_dppo.conversion.to_hf import write_hf
from megatron_dppo.conversion.unfinished import refuse_existing
from megatron_dppo.errors import ConversionError, MegatronDppoError
from megatron_dppo.plan.units import parse_bytes
from megatron_dppo.runtime import process as runtime

logger = logging.getLogger("megatron_dppo.tools.convert_checkpoint")
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(help="Folder to write; must not exist.")]
HuggingFace = Annotated[Path, typer.Option(help="Hugging Face folder: config.json, safetensors, tokenizer.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Write float32 or bfloat16 in the place of the checkpoint's own type (a rounding)."),
]
ShardSize = Annotated[str, typer.Option(help="Most bytes of a file, as 500MB or 4GiB.")]
Writers = Annotated[int, typer.Option(min=1, help="Files that a process writes at a time.")]


@app.command()
def to_megatron(
    hf: HuggingFace, out: Out, dtype: Dtype = None, shard_size: ShardSize = "4GiB", writers: Writers = 2
) -> None:
    """Hugging Face -> Megatron. Any parallel layout loads the result."""
    from megatron_dppo.conversion.to_megatron import write_megatron

    with _user_errors(), _process() as this:
        refuse_existing(out)
        config, source = read_convertible_config(hf), HuggingFaceSource(HFWeights(hf, 2 * writers))
        with _options(source, this, dtype, shard_size, writers) as options:
            write_megatron(source, config, out, options, this)
        logger.info("wrote %s", out)


@app.command()
def to_hf(
    megatron: Annotated[
        Path, typer.Option(help="Megatron checkpoint, converted or from a run's checkpoints/.")
    ],
    out: Out,
    hf_template: Annotated[
        Path | None, typer.Option(help="Folder to take config and tokenizer from. [default: MEGATRON/hf]")
    ] = None,
    dtype: Dtype = None,
    shard_size: ShardSize = "4GiB",
    writers: Writers = 1,
) -> None:
    """Megatron -> Hugging Face, one name per expert, as transformers and SGLang read it; LoRA is merged."""
    with _user_errors(), _process() as this:
        refuse_existing(out)
        template = hf_template or megatron / "hf"
        source = MegatronSource(megatron, read_convertible_config(hf_template or megatron))
        with _options(source, this, dtype, shard_size, writers) as options:
            write_hf(source, template, out, options, this)
        logger.info("wrote %s", out)


@app.command()
def to_adapter(
    megatron: Annotated[Path, typer.Option(help="Megatron checkpoint of a LoRA run's checkpoints/.")],
    out: Out,
    base: Annotated[str, typer.Option(help="Name or folder of the base model, for the adapter's config.")] = "",
) -> None:
    """LoRA's adapters of a Megatron checkpoint -> a folder that peft, SGLang and vLLM read."""
    with _user_errors():
        refuse_existing(out)
        from megatron_dppo.models.lora_files import adapter_tensors, write_adapter
        from megatron_dppo.models.megatron_folder import stored_dtype, stored_lora

        with _one_process_model(megatron, stored_dtype(megatron)) as (model, _):
            options = stored_lora(megatron)
            if options is None:
                raise ConversionError(f"{megatron} holds no LoRA adapters. Use to-hf for its weights.")
            write_adapter(adapter_tensors(model), options, out, base)
    logger.info("wrote %s", out)


@app.command()
def merge_adapter(
    hf: HuggingFace,
    adapter: Annotated[Path, typer.Option(help="LoRA adapter in peft's format.")],
    out: Out,
    dtype: Dtype = None,
    shard_size: ShardSize = "4GiB",
    writers: Writers = 1,
) -> None:
    """Hugging Face + a peft LoRA adapter -> Hugging Face, with the sums that peft's own merge gives."""
    with _user_errors(), _process() as this:
        refuse_existing(out)
        read_convertible_config(hf)
        source = MergedSource(HFWeights(hf, 2 * writers), adapter)
        with _options(source, this, dtype, shard_size, writers) as options:
            write_hf(source, hf, out, options, this)
        logger.info("wrote %s", out)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Hugging Face folder or Megatron checkpoint.")],
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
) -> None:
    """What a checkpoint is and holds; no tensor is read."""
    with _user_errors():
        for line in contents_of(folder, is_listing=tensors):
            typer.echo(line)


@app.command()
def verify(
    first: Annotated[Path, typer.Argument(help="Hugging Face folder or Megatron checkpoint.")],
    second: Annotated[Path, typer.Argument(help="The other one, of either kind.")],
) -> None:
    """Compare two checkpoints bit for bit by Hugging Face name; ends with 1 where they differ."""
    with _user_errors():
        pair = _source(first), _source(second)
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


def _source(folder: Path) -> Source:
    is_megatron = (folder / "megatron" / "metadata.json").is_file()
    return MegatronSource(folder) if is_megatron else HuggingFaceSource(HFWeights(folder))


@contextmanager
def _process() -> Iterator[runtime.Runtime]:
    this = runtime.start(num_threads=torch.get_num_threads())
    try:
        yield this
    finally:
        runtime.stop()


@contextmanager
def _options(
    source: Source, this: runtime.Runtime, dtype: str | None, shard_size: str, writers: int
) -> Iterator[Options]:
    with _progress(source, this.world_size if this.is_main else 0) as on_bytes:
        yield Options(_dtype(dtype), parse_bytes(shard_size, "--shard-size"), writers, on_bytes)


@contextmanager
def _progress(source: Source, num_sharers: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes with the time that is left; of one process's share where several write, of none with 0."""
    total = sum(tensor.numel() * tensor.itemsize for tensor in source.outline().values())
    with tqdm(
        total=total // max(num_sharers, 1),
        unit="B",
        unit_scale=True,
        desc=source.folder.name,
        disable=not num_sharers,
    ) as bar:

        def on_bytes(num_bytes: int) -> None:
            bar.update(num_bytes)

        yield on_bytes


@contextmanager
def _one_process_model(folder: Path, dtype: torch.dtype) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The whole model on this process, with the weights and adapters of `folder`, and its config.json."""
    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import read_hf_config
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config
    from megatron_dppo.models.lora import add_lora
    from megatron_dppo.models.megatron_folder import load_weights, stored_lora

    hf = read_hf_config(folder)
    with _process():
        cpu.install()
        fixes.apply()
        layout = Layout(world_size=1)
        initialize_groups(layout, seed=0)
        model = build_model(hf, transformer_config(hf, dtype, megatron_sizes(layout), {}))
        options = stored_lora(folder)
        if options is not None:
            add_lora(model, hf, options, seed=0)
        logger.info("reading %s", folder)
        load_weights(model, folder, hf)
        yield model, hf


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in ("float32", "bfloat16"):
        raise ConversionError(
            f"--dtype: found {name!r}; expected float32 or bfloat16. Leave it out to keep every bit."
        )
    return getattr(torch, name)


@contextmanager
def _user_errors() -> Iterator[None]:
    try:
        yield
    except MegatronDppoError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    app()
