"""Convert checkpoints between Hugging Face and Megatron-Core, bit for bit.

python tools/convert_checkpoint.py to-megatron --hf Qwen3-30B-A3B --out Qwen3-30B-A3B-megatron
python tools/convert_checkpoint.py to-hf --megatron runs/run/checkpoints/step_00000100 --out trained
python tools/convert_checkpoint.py to-adapter --megatron runs/run/checkpoints/step_00000100 --out adapter
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from megatron_dppo import runtime
from megatron_dppo.errors import ConversionError, MegatronDppoError

logger = logging.getLogger("megatron_dppo.tools.convert_checkpoint")
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Dtype = Annotated[
    str | None,
    typer.Option(help="Write float32 or bfloat16 in the place of the checkpoint's own type (a rounding)."),
]


@app.command()
def to_megatron(
    hf: Annotated[Path, typer.Option(help="Hugging Face folder: config.json, safetensors, tokenizer.")],
    out: Annotated[Path, typer.Option(help="Megatron checkpoint to write; must not exist.")],
    dtype: Dtype = None,
) -> None:
    """Hugging Face -> Megatron. Any parallel layout loads the result."""
    with _user_errors():
        _refuse_existing(out)
        from megatron_dppo.models.hf_checkpoint import HFWeights, dtype_of

        own = dtype_of(HFWeights(hf))
        with _one_process_model(hf, _dtype(dtype) or own) as (model, _):
            from megatron_dppo.models.megatron_checkpoint import save_weights

            save_weights(model, out, template=hf)
    logger.info("wrote %s", out)


@app.command()
def to_hf(
    megatron: Annotated[
        Path, typer.Option(help="Megatron checkpoint, converted or from a run's checkpoints/.")
    ],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to write; must not exist.")],
    hf_template: Annotated[
        Path | None, typer.Option(help="Folder to take config and tokenizer from. [default: MEGATRON/hf]")
    ] = None,
    dtype: Dtype = None,
) -> None:
    """Megatron -> Hugging Face, one name per expert, as transformers and SGLang read it; LoRA is merged."""
    with _user_errors():
        _refuse_existing(out)
        template = hf_template or megatron / "hf"
        from megatron_dppo.models.convert import export_hf_weights
        from megatron_dppo.models.hf_checkpoint import write_hf_checkpoint
        from megatron_dppo.models.megatron_checkpoint import stored_dtype

        with _one_process_model(megatron, _dtype(dtype) or stored_dtype(megatron), template) as (model, config):
            weights = _with_progress(export_hf_weights(model, config))
            write_hf_checkpoint(weights, out, template)
    logger.info("wrote %s", out)


@app.command()
def to_adapter(
    megatron: Annotated[Path, typer.Option(help="Megatron checkpoint of a LoRA run's checkpoints/.")],
    out: Annotated[Path, typer.Option(help="Adapter folder to write; must not exist.")],
    base: Annotated[str, typer.Option(help="Name or folder of the base model, for the adapter's config.")] = "",
) -> None:
    """LoRA's adapters of a Megatron checkpoint -> a folder that peft, SGLang and vLLM read."""
    with _user_errors():
        _refuse_existing(out)
        from megatron_dppo.models.lora_files import adapter_tensors, write_adapter
        from megatron_dppo.models.megatron_checkpoint import stored_dtype, stored_lora

        with _one_process_model(megatron, stored_dtype(megatron)) as (model, _):
            options = stored_lora(megatron)
            if options is None:
                raise ConversionError(f"{megatron} holds no LoRA adapters. Use to-hf for its weights.")
            write_adapter(adapter_tensors(model), options, out, base)
    logger.info("wrote %s", out)


def _with_progress(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    with tqdm(unit="B", unit_scale=True, desc="tensors") as bar:
        for name, tensor in weights:
            yield name, tensor
            bar.update(tensor.numel() * tensor.element_size())


@contextmanager
def _one_process_model(
    folder: Path, dtype: torch.dtype, template: Path | None = None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The whole model on this process, with the weights of `folder`, and its config.json."""
    from megatron_dppo.actor import cpu, mcore_fixes
    from megatron_dppo.actor.groups import initialize_groups, megatron_sizes
    from megatron_dppo.actor.layout import Layout
    from megatron_dppo.models.build import build_model, transformer_config
    from megatron_dppo.models.family import read_hf_config
    from megatron_dppo.models.lora import add_lora
    from megatron_dppo.models.megatron_checkpoint import is_megatron_checkpoint, load_weights, stored_lora

    hf = read_hf_config(template or folder)
    runtime.start(num_threads=torch.get_num_threads())
    try:
        cpu.install()
        mcore_fixes.apply()
        layout = Layout(world_size=1)
        initialize_groups(layout, seed=0)
        model = build_model(hf, transformer_config(hf, dtype, megatron_sizes(layout), {}))
        options = stored_lora(folder) if is_megatron_checkpoint(folder) else None
        if options is not None:
            add_lora(model, hf, options, seed=0)
        logger.info("reading %s", folder)
        load_weights(model, folder, hf)
        yield model, hf
    finally:
        runtime.stop()


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in ("float32", "bfloat16"):
        raise ConversionError(
            f"--dtype: found {name!r}; expected float32 or bfloat16. Leave it out to keep every bit."
        )
    return getattr(torch, name)


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConversionError(f"--out: {out} exists. Give a new folder, or remove that one first.")


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
