"""Maps the tensor names of published checkpoints to the names of the weight table.

Newer transformers may stack all experts of a layer in one tensor. Some publishers store weights as 8-bit floats
with a scale for each block. Both are mapped to one tensor per expert and linear, in a dtype for computation.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.architectures.weight_map import EXPERT_BIAS
from megatron_dppo.errors import ConversionError

SCALES = "_scale_inv"
"""Suffix of the name of an 8-bit weight's scales."""
BLOCK = 128
"""Rows and columns of a block with one scale, in every published checkpoint with 8-bit weights."""
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors in which transformers stacks a layer's experts, and the linears of each expert in them."""
_STACKED = re.compile(rf"(.+\.mlp\.experts)\.({'|'.join(STACKS)})")
FLOAT8 = "F8_E4M3"
_FLOAT32 = EXPERT_BIAS.hf[0].rpartition(".")[2]


def stays_float32(name: str) -> bool:
    """Whether a tensor is always read, kept and written as float32, such as a router's expert bias."""
    return name.endswith(_FLOAT32)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, or a part of one, in a safetensors file.

    Attributes:
        file: File name in the folder.
        name: Tensor name in the file.
        dtype: Dtype in the file's header, such as "BF16".
        shape: Shape of the part.
        expert: Index in the stack of experts; None if experts are separate.
        rows: First and last row along dimension 0 of the tensor or of the expert; None means all.
        scales: Location of the block scales of 8-bit weights.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None
    scales: "StoredTensor | None" = None

    @property
    def shown_dtype(self) -> str:
        """Dtype of the tensor as read: 8-bit weights become bfloat16, expert biases float32."""
        if stays_float32(self.name):
            return "F32"
        return self.dtype if self.scales is None else "BF16"


def in_table_spelling(
    stored: Mapping[str, StoredTensor], module_names: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Return a folder's tensors under the weight table's names: separate experts, with their scales.

    Args:
        stored: Tensors by their names in the files.
        module_names: The family's parts of transformers' names, and the parts that replace them.

    Raises:
        ConversionError: Scales have no weight, or an 8-bit weight has no scales or scales of a wrong shape.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALES):
            _require_weight(tensor, stored.get(name.removesuffix(SCALES)))
            continue
        whole = replace(tensor, scales=stored.get(name + SCALES))
        if whole.scales is not None or tensor.dtype == FLOAT8:
            _require_scales(whole)
        for own, part in _experts(name, whole):
            for ours, theirs in module_names.items():
                own = own.replace(ours, theirs)
            found[own] = part
    return found


def _experts(name: str, whole: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    stacked = _STACKED.fullmatch(name)
    if stacked is None or len(whole.shape) != 3:
        yield name, whole
        return
    experts, rows, *columns = whole.shape
    linears = STACKS[stacked[2]]
    width = rows // len(linears)
    for expert in range(experts):
        for index, linear in enumerate(linears):
            place = (index * width, (index + 1) * width)
            part = replace(whole, shape=(width, *columns), expert=expert, rows=place)
            yield f"{stacked[1]}.{expert}.{linear}.weight", part


def _require_weight(scales: StoredTensor, weight: StoredTensor | None) -> None:
    if weight is None:
        raise ConversionError(
            f"{scales.file}: {scales.name!r} are scales of a weight that is not there. Expected also "
            f"{scales.name.removesuffix(SCALES)!r}; download the checkpoint again."
        )


def _require_scales(weight: StoredTensor) -> None:
    *stack, rows, columns = weight.shape if len(weight.shape) > 1 else (1, *weight.shape)
    expected = (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    scales = weight.scales
    if weight.dtype != FLOAT8 or scales is None or scales.shape != expected:
        found = "no scales" if scales is None else f"scales of shape {scales.shape}"
        raise ConversionError(
            f"{weight.file}: {weight.name!r} of shape {weight.shape} is {weight.dtype} with {found}. Expected "
            f"{FLOAT8} with {weight.name + SCALES!r} of shape {expected}, one for each block of "
            f"{BLOCK} x {BLOCK}; other quantised formats are not read."
        )


def dequantized(weight: Tensor, scales: Tensor, first_row: int = 0) -> Tensor:
    """Dequantise weights of block-wise scaled 8-bit floats: product in float32, rounded to bfloat16.

    Args:
        weight: [N, M] float8_e4m3fn.
        scales: [ceil(rows / 128), ceil(M / 128)] of the whole weight.
        first_row: Index of `weight`'s first row in the complete weight.
    """
    rows = (torch.arange(weight.shape[0]) + first_row) // BLOCK
    columns = torch.arange(weight.shape[1]) // BLOCK
    return (weight.float() * scales.float()[rows][:, columns]).to(torch.bfloat16)
