"""Maps the tensor names of published checkpoints to the names of the weight table, and back.

Newer transformers may stack all experts of a layer in one tensor. Some publishers store weights as 8-bit floats
with a scale for each block. Both are mapped to one tensor per expert and linear, in a dtype for computation.

gpt-oss's experts are published only in stacks of [experts, in, out], and the columns of gate and up take turns.
Publishers store them as MXFP4: 4-bit floats of [experts, out, in], and a power of two for each 32 of them.
These stacks are made again when weights are written or pushed (`in_published_stacks`), in the weights' dtype.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.architectures.weight_map import EXPERT_BIAS
from megatron_dppo.errors import ConversionError

SCALES = "_scale_inv"
"""Suffix of the name of an 8-bit weight's scales."""
BLOCK = 128
"""Rows and columns of a block with one scale, in every published checkpoint with 8-bit weights."""
STACKS: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors in which transformers stacks a layer's experts, and the linears of each expert in them."""
_STACKED = re.compile(rf"(.+\.mlp\.experts)\.({'|'.join(STACKS)})")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_INTERLEAVED = re.compile(rf"(.+\.mlp\.experts)\.({'|'.join(STACKS)})(_bias|_blocks|_scales)?")
FLOAT8 = "F8_E4M3"
MXFP4 = "U8"
"""Dtype in which safetensors hold two 4-bit floats, or a scale of MXFP4."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""4-bit floats by their 3 bits; the fourth is the sign."""
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
        turn: First index of an interleaved linear's outputs in the expert, and their distance; None means all.
        scales: Location of the scales of 8-bit and 4-bit weights.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    expert: int | None = None
    rows: tuple[int, int] | None = None
    turn: tuple[int, int] | None = None
    scales: "StoredTensor | None" = None

    @property
    def shown_dtype(self) -> str:
        """Dtype of the tensor as read: 8-bit and 4-bit weights become bfloat16, expert biases float32."""
        if stays_float32(self.name):
            return "F32"
        return self.dtype if self.scales is None else "BF16"


def in_table_spelling(
    stored: Mapping[str, StoredTensor], module_names: Mapping[str, str], *, is_interleaved: bool = False
) -> dict[str, StoredTensor]:
    """Return a folder's tensors under the weight table's names: separate experts, with their scales.

    Args:
        stored: Tensors by their names in the files.
        module_names: The family's parts of transformers' names, and the parts that replace them.
        is_interleaved: Whether the family's stacks of experts are [in, out], with gate and up in turn.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if is_interleaved and (stack := _INTERLEAVED.fullmatch(name)) is not None:
            found |= _interleaved_experts(stack, tensor, stored)
            continue
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


def _interleaved_experts(
    stack: re.Match[str], whole: StoredTensor, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each expert's linears, or their biases, of an interleaved stack; nothing of a stack of scales."""
    experts, stacked, kind = stack[1], stack[2], stack[3] or ""
    weight = f"{experts}.{stacked}"
    if kind in ("_blocks", "_scales"):
        pair = stored.get(f"{weight}_blocks"), stored.get(f"{weight}_scales")
        _require_mxfp4(whole, *pair)
        if kind == "_scales":
            return
        num_experts, num_outputs, num_groups, _ = whole.shape
        shape, scales = (num_outputs, 32 * num_groups), pair[1]
    else:
        (num_experts, *columns, num_outputs), scales = whole.shape, None
        shape = (num_outputs, *columns)
    linears = STACKS[stacked]
    for expert in range(num_experts):
        for first, linear in enumerate(linears):
            turn, own = (first, len(linears)), (shape[0] // len(linears), *shape[1:])
            part = replace(whole, shape=own, expert=expert, turn=turn, scales=scales)
            yield f"{experts}.{expert}.{linear}.{'bias' if kind == '_bias' else 'weight'}", part


def _require_mxfp4(of: StoredTensor, blocks: StoredTensor | None, scales: StoredTensor | None) -> None:
    if blocks is not None and scales is not None:
        fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, 16)
        if fits and {blocks.dtype, scales.dtype} == {MXFP4}:
            return
    found = " and ".join(f"{x.name!r} {x.shape} of {x.dtype}" for x in (blocks, scales) if x is not None)
    raise ConversionError(
        f"{of.file}: {found}. Expected blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32], "
        f"all {MXFP4}: MXFP4. Download the checkpoint again."
    )


def in_published_stacks(
    weights: Iterable[tuple[str, Tensor]], num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield a family's weights with interleaved stacks in place of single experts; others are not changed.

    Args:
        weights: Pairs of a name and a tensor. The parts of a stack may come in any order.
        num_experts: Number of experts in each layer.
    """
    stacks: dict[str, tuple[Tensor, set[tuple[int, int]]]] = {}
    for name, tensor in weights:
        place = _EXPERT.fullmatch(name)
        if place is None:
            yield name, tensor
            continue
        stack, expert, linear = published_name(name), int(place[2]), f"{place[3]}_proj"
        linears = next(each for each in STACKS.values() if linear in each)
        part = tensor.mT if tensor.dim() > 1 else tensor
        if stack not in stacks:
            shape = (num_experts, *part.shape[:-1], part.shape[-1] * len(linears))
            stacks[stack] = part.new_empty(shape), set()
        whole, there = stacks[stack]
        first = linears.index(linear)
        whole[expert, ..., first :: len(linears)].copy_(part)
        there.add((expert, first))
        if len(there) == num_experts * len(linears):
            del stacks[stack]
            yield stack, whole
    assert not stacks, "the experts of a layer come together"


def published_name(name: str) -> str:
    """Return the name of the interleaved stack that an expert's tensor is part of; others as they are."""
    place = _EXPERT.fullmatch(name)
    if place is None:
        return name
    stack = next(stack for stack, linears in STACKS.items() if f"{place[3]}_proj" in linears)
    return f"{place[1]}.{stack}{'_bias' if place[4] == 'bias' else ''}"


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


def dequantized_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise MXFP4 weights to bfloat16 [..., out, in]; each value is exact unless it overflows bfloat16.

    Args:
        blocks: [..., out, in / 32, 16] uint8, two values in each: the first in the low four bits.
        scales: [..., out, in / 32] uint8, exponents of 2 plus 127.
    """
    exponents = (scales.int() - 127).unsqueeze(-1)
    return torch.ldexp(unpacked_fp4(blocks), exponents).to(torch.bfloat16).flatten(-2)


def unpacked_fp4(packed: Tensor) -> Tensor:
    """Return the values [..., 2 N] float32 of 4-bit floats [..., N] uint8: the first in the low four bits."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return torch.tensor(FP4_VALUES + tuple(-value for value in FP4_VALUES), device=packed.device)[codes]
