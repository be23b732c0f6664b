"""Reads a Hugging Face folder that nvidia-modelopt quantised, as plain numbers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.checkpoints.weight_formats import WeightFormat, dequantize_fp8, dequantize_nvfp4
from megatron_dppo.errors import ConversionError

QUANTIZATION = "quantization_config"
_FORMATS: Mapping[str, WeightFormat] = {"FP8": "fp8", "NVFP4": "nvfp4"}
_SCALE, _OUTER_SCALE, _INPUT_SCALE = "_scale", "_scale_2", "input_scale"


class QuantizedFolder:
    """Reads the tensors of a quantised checkpoint, and dequantises each on demand."""

    def __init__(self, folder: Path) -> None:
        """Read config.json and the headers of all files.

        Raises:
            ConfigError: There is no config.json.
            ConversionError: config.json does not describe modelopt's FP8 or NVFP4, or a file is torn.
        """
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
        """Yield each weight under its Hugging Face name: dequantised weights in float32, others as stored.

        Raises:
            ConversionError: A weight's scales are missing, or its values have another format.
        """
        for name in sorted(self._files):
            if not name.endswith((_SCALE, _OUTER_SCALE)):
                yield name, self._dequantized(name) if name + _SCALE in self._files else self._plain(name)

    def input_scales(self) -> dict[str, Tensor]:
        """Return the float32 scale `[]` of each quantised linear's input, by the linear's weight."""
        return {name: self._tensor(name.removesuffix("weight") + _INPUT_SCALE) for name in self.quantized}

    def _dequantized(self, name: str) -> Tensor:
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
    found: Any = config.get(QUANTIZATION) or {}
    is_modelopts = found.get("quant_method") == "modelopt"
    algorithm = str(found.get("quant_algo"))
    if not is_modelopts or algorithm not in _FORMATS:
        raise ConversionError(
            f"{path}: found {QUANTIZATION} {json.dumps(found)[:80]}; expected quant_method 'modelopt' with "
            f"quant_algo of {sorted(_FORMATS)}. Quantise the original with megatron-dppo quantize."
        )
    return _FORMATS[algorithm]
