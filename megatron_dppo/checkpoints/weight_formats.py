"""Rounds to FP8 and NVFP4, the number formats of nvidia-modelopt, and reads folders that it quantised.

FP8 is float8-e4m3 with one scale for a weight. NVFP4 is e2m1 (4 bits, two values to a byte) with a float8-e4m3
scale for each block of 16 along the input, and one float32 scale above those. Linears that inference engines
fuse (q, k and v; gate and up) share the scale of the weight, so that fusing them rounds nothing.
The arithmetic is modelopt's, bit for bit (`tests/unit/test_weight_formats.py`), without the library, which
is optional, has 14 dependencies, and takes five times as long to import as torch.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dppo.architectures.published_names import FP4_VALUES, unpacked_fp4
from megatron_dppo.architectures.registry import QUANTIZED
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.errors import ConversionError

WeightFormat = Literal["fp8", "nvfp4"]

BLOCK = 16
"""Values along the input that share one of NVFP4's inner scales."""
_FP8_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
_FP8_SMALLEST = 2.0**-9
_FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours
_LEAST = 1e-12  # smallest scale: a weight of zeros must not divide by 0
_LINEAR = re.compile(r"(.+\.)(q|k|v|o|gate|up|down)_proj\.weight")
_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


def scale_for(weight_format: WeightFormat, largest: Tensor) -> Tensor:
    """Return the float32 scale `[]` for a largest absolute value of `largest`; for NVFP4, the outer scale."""
    most = _FP8_MAX if weight_format == "fp8" else FP4_VALUES[-1] * _FP8_MAX
    return largest.float().clamp_min(_LEAST) / most


def quantize_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """Quantise `values` to float8_e4m3fn of the same shape, for `dequantize_fp8`; overflowing values saturate.

    Args:
        values: bfloat16 or float32; the quotient is rounded to this dtype before it is rounded to 8 bits.
        scale: [] float32.
    """
    return (values / scale).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def dequantize_fp8(quantized: Tensor, scale: Tensor) -> Tensor:
    """Dequantise FP8 values to float32."""
    return quantized.float() * scale.float()


def quantize_nvfp4(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values to NVFP4, for `dequantize_nvfp4`: packed values, and one scale per block.

    Args:
        values: [..., in] bfloat16 or float32; `in` is a multiple of BLOCK.
        scale: [] float32, the outer one.

    Returns:
        uint8 `[..., in / 2]`, an even place in the low four bits, and float8_e4m3fn `[..., in / BLOCK]`.
    """
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    block_scales = blocks.abs().amax(-1) / (FP4_VALUES[-1] * scale)
    block_scales = torch.where(block_scales == 0, 1.0, block_scales)  # a block of zeros
    block_scales = block_scales.clamp(_FP8_SMALLEST, _FP8_MAX).to(torch.float8_e4m3fn)
    codes = _fp4_codes(blocks / (block_scales.float() * scale).unsqueeze(-1)).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, block_scales


def _fp4_codes(values: Tensor) -> Tensor:
    """Return the nearest of NVFP4's values, as bits; halfway between two, the one with last bit 0."""
    bounds = values.new_tensor(_FP4_BOUNDS)
    lower = torch.searchsorted(bounds, values.abs().contiguous())
    upper = torch.searchsorted(bounds, values.abs().contiguous(), right=True)
    nearest = torch.where(lower % 2 == 0, lower, upper)
    return (nearest | (values < 0).long() << 3).to(torch.uint8)


def dequantize_nvfp4(packed: Tensor, block_scales: Tensor, scale: Tensor) -> Tensor:
    """Dequantise NVFP4 values `[..., in]` to float32."""
    scales = block_scales.float() * scale.float()
    return (unpacked_fp4(packed).unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(-2)


def round_values(values: Tensor, weight_format: WeightFormat, scale: Tensor) -> Tensor:
    """Round values to the format, as float32."""
    if weight_format == "fp8":
        return dequantize_fp8(quantize_fp8(values, scale), scale)
    return dequantize_nvfp4(*quantize_nvfp4(values, scale), scale)


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of a quantised linear; routers and vocabulary layers are not quantised."""
    return _LINEAR.fullmatch(name) is not None


def fused_linears(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the quantised linears among `names` by the scale that they share."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _LINEAR.fullmatch(name)
        if found is not None:
            groups.setdefault(found[1] + _FUSED.get(found[2], found[2]), []).append(name)
    return [tuple(group) for group in groups.values()]


@torch.no_grad()
def round_linears(weights: Mapping[str, Tensor], weight_format: WeightFormat) -> None:
    """Round a model's linears in place, by Hugging Face name; each group of fused ones must be complete."""
    for group in fused_linears(weights):
        largest = torch.stack([weights[name].abs().amax() for name in group]).amax()
        scale = scale_for(weight_format, largest)
        for name in group:
            weights[name].copy_(round_values(weights[name], weight_format, scale))


_FORMATS: Mapping[str, WeightFormat] = {"FP8": "fp8", "NVFP4": "nvfp4"}
_SCALE, _OUTER_SCALE, _INPUT_SCALE = "_scale", "_scale_2", "input_scale"


class QuantizedFolder:
    """Reads the tensors of a quantised checkpoint, and dequantises each on demand."""

    def __init__(self, folder: Path) -> None:
        """Read config.json and the headers of all files."""
        self.folder = folder
        path, config = read_model_config(folder)
        self.weight_format: WeightFormat = _format_of(path, config)
        self._files: dict[str, safe_open] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                mapped = safe_open(file, "pt")
            except (SafetensorError, OSError) as error:
                raise ConversionError(
                    f"{file}: torn or not safetensors ({error}). Quantise it again."
                ) from error
            self._files |= dict.fromkeys(mapped.keys(), mapped)

    @property
    def quantized(self) -> set[str]:
        """Names of the weights that have scales."""
        return {name for name in self._files if name + _SCALE in self._files}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight under its Hugging Face name: dequantised weights in float32, others as stored."""
        for name in sorted(self._files):
            if not name.endswith((_SCALE, _OUTER_SCALE)):
                yield name, self._dequantize(name) if name + _SCALE in self._files else self._plain(name)

    def input_scales(self) -> dict[str, Tensor]:
        """Return the float32 scale `[]` of each quantised linear's input, by the linear's weight."""
        return {name: self._tensor(name.removesuffix("weight") + _INPUT_SCALE) for name in self.quantized}

    def _dequantize(self, name: str) -> Tensor:
        values, scale = self._tensor(name), self._tensor(name + _SCALE)
        if self.weight_format == "fp8" and values.dtype == torch.float8_e4m3fn and scale.numel() == 1:
            return dequantize_fp8(values, scale)
        if self.weight_format == "nvfp4" and values.dtype == torch.uint8:
            return dequantize_nvfp4(values, scale, self._tensor(name + _OUTER_SCALE))
        raise ConversionError(
            f"{self.folder}: {name!r} is {values.dtype} with a scale of shape {tuple(scale.shape)}; expected "
            f"modelopt's {self.weight_format}. Quantise the original with megatron-dppo quantize."
        )

    def _plain(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise ConversionError(
                f"{self.folder}: {name!r} is {tensor.dtype} without a scale. Quantise the original again."
            )
        return tensor

    def _tensor(self, name: str) -> Tensor:
        if name not in self._files:
            raise ConversionError(
                f"{self.folder}: tensor {name!r} is missing; it has {len(self._files)} others. Quantise the "
                "original again."
            )
        return self._files[name].get_tensor(name)


def _format_of(path: Path, config: Mapping[str, Any]) -> WeightFormat:
    found: Any = config.get(QUANTIZED) or {}
    is_modelopts = found.get("quant_method") == "modelopt"
    algorithm = str(found.get("quant_algo"))
    if not is_modelopts or algorithm not in _FORMATS:
        raise ConversionError(
            f"{path}: found {QUANTIZED} {json.dumps(found)[:80]}; expected quant_method 'modelopt' with "
            f"quant_algo of {sorted(_FORMATS)}. Quantise the original with megatron-dppo quantize."
        )
    return _FORMATS[algorithm]
