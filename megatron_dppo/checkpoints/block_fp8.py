"""Quantises weights to 8-bit floats with one scale per block of 128 x 128, which SGLang can serve and reload.

Values are float8_e4m3fn. Scales are float32, and powers of two if config.json asks for "ue8m0". Both are
SGLang's, bit for bit (`tests/sglang/test_pushed_fp8.py`). `architectures/published_names.py` reads the form.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_dppo.architectures.published_names import BLOCK, SCALES
from megatron_dppo.architectures.registry import QUANTIZED, is_block_fp8
from megatron_dppo.checkpoints.weight_formats import fused_linears

QuantizedFormat = Literal["fp8", "nvfp4", "fp8_block"]
"""Formats of `megatron-dppo quantize`: two of nvidia-modelopt, and this one."""
FP8_BLOCK = "fp8_block"
"""Name of the form in options and messages."""
_LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)
_LEAST = 1e-4  # largest absolute value that a block is taken to have at least
_LINEAR = re.compile(r".+\.(?:(?:q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa|w[123])\.weight")
_DOWN_TO_LATENT = re.compile(r"(.+)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\..+")
_IGNORED = ("ignored_layers", "modules_to_not_convert")  # the first that config.json has, as in SGLang
_FEW = 1 << 20  # elements of a tensor that may wait until the others are sent


def quantize_blocks(weight: Tensor, *, is_power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, M] to float8_e4m3fn, with scales [ceil(N / 128), ceil(M / 128)] float32."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp_min(_LEAST) / _LARGEST
    if is_power_of_two:
        mantissas, exponents = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponents - (mantissas == 0.5).int())
    values = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
    return values[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()


def fused(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the quantised linears among `names` by the linear into which SGLang fuses them."""
    names = list(names)
    groups: dict[str, tuple[str, ...]] = {}
    for name in names:
        if found := _DOWN_TO_LATENT.fullmatch(name):
            groups[found[1]] = (*groups.get(found[1], ()), name)
    return [*fused_linears(names), *groups.values()]


def round_groups(values: Tensor) -> Tensor:
    """Round the inputs [..., M] of a linear as SGLang does: one scale per 128 values of a token."""
    columns = values.shape[-1]
    groups = F.pad(values.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / _LARGEST
    rounded = (groups / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scales
    return rounded.flatten(-2)[..., :columns].to(values.dtype)


@dataclass(frozen=True)
class BlockFP8:
    """The form of a folder's weights, by its config.json.

    Attributes:
        ignored: Modules that stay unquantised, by name or part of a name, besides embedding, lm_head, norms and
            routers.
        is_power_of_two: Whether scales are powers of two.
    """

    ignored: tuple[str, ...] = ()
    is_power_of_two: bool = False

    @classmethod
    def of(cls, hf: Mapping[str, Any]) -> "BlockFP8 | None":
        """Return the form that a config.json describes, or None if it describes no block-wise 8-bit weights."""
        table = hf.get(QUANTIZED)
        if not is_block_fp8(table):
            return None
        assert isinstance(table, Mapping)
        named: Sequence[str] = next((table[key] for key in _IGNORED if key in table), None) or ()
        return cls(tuple(named), table.get("scale_fmt") == "ue8m0")

    def described(self) -> dict[str, Any]:
        """Return the quantization_config of config.json."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(self.ignored),
        } | ({"scale_fmt": "ue8m0"} if self.is_power_of_two else {})

    def quantizes(self, name: str) -> bool:
        """Return whether SGLang expects this tensor quantised, by its name; it expects all experts or none."""
        if _LINEAR.fullmatch(name) is None:
            return False
        if (expert := _EXPERT.fullmatch(name)) is None:
            return not self._is_ignored(name.removesuffix(".weight"))
        experts = expert[1]
        return not self._is_ignored(experts) and not any(
            experts in f"model.{ignored.removeprefix('model.')}"
            for ignored in self.ignored
            if "experts" in ignored
        )

    def _is_ignored(self, module: str) -> bool:
        bases = (ignored.removeprefix("model.").rstrip(".") for ignored in self.ignored)
        return any(f".{base}." in f".{module}." for base in bases)

    def quantized(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights in this form: linears with their scales, which are named `<weight>_scale_inv`.

        Scales and small unquantised tensors come last, so that few buckets of a push have another dtype than
        float8_e4m3fn.
        """
        waiting: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            if self.quantizes(name):
                values, scales = quantize_blocks(tensor, is_power_of_two=self.is_power_of_two)
                waiting.append((name + SCALES, scales))
                yield name, values
            elif tensor.numel() < _FEW:
                waiting.append((name, tensor.clone()))
            else:
                yield name, tensor
        yield from sorted(waiting, key=lambda pair: str(pair[1].dtype))
