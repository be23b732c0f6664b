"""LoRA: low-rank updates of frozen linears (arXiv 2106.09685), trained in place of the model's own weights.

Each targeted Hugging Face linear has a pair of factors, A [rank, in] and B [out, rank], and computes
`W x + alpha / rank * B (A x)`. A Megatron linear fuses several of these linears (queries, keys and values; gate
and up). So each Megatron linear gets one adapter, with one pair for each Hugging Face linear in it, because
peft trains such pairs. The model's own parameters keep their names.

If tensor parallelism splits a linear's outputs, A is replicated and B is split like the outputs. If it splits
the inputs, A is split and B is replicated. If it does not split the linear, both are replicated. Replicated
factors see only this rank's slice of the sequence, and Megatron sums their gradients like the gradients of
norms. Only activations of width `rank` are exchanged. Experts' pairs are stacked, and split over
expert-parallel and expert-tensor-parallel ranks like the experts.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dppo.architectures.registry import family_of, model_sizes
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.weight_map import ADAPTER_SUFFIX, WeightEntry, WeightRule, linears_of
from megatron_dppo.config.schema import LoraConfig
from megatron_dppo.errors import CheckpointError
from megatron_dppo.kernels.ops import grouped_product
from megatron_dppo.mcore.groups import with_summed_gradient

Read = Callable[[Tensor], Tensor]
"""Returns the values of a tensor that may be offloaded."""


def itself(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the reader for weights that are not offloaded."""
    return tensor


class Pair(torch.nn.Module):
    """The factors of one Hugging Face linear, or of one linear of each of this rank's experts."""

    def __init__(self, lora_a: Tensor, lora_b: Tensor) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(lora_a)  # [(experts,) rank, in]
        self.lora_B = torch.nn.Parameter(lora_b)  # [(experts,) out, rank]

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return A and B; called, because Megatron waits for updates of other ranks before a call."""
        return self.lora_A, self.lora_B


class Adapter(torch.nn.Module):
    """LoRA pairs of one Megatron linear, keyed by the last part of each Hugging Face linear's name."""

    def __init__(
        self, entry: WeightEntry, sizes: Mapping[str, int], groups: int, pairs: Mapping[str, Pair], alpha: int
    ) -> None:
        """Register the pairs.

        Args:
            entry: The weight that is updated.
            sizes: This rank's outputs of each Hugging Face linear in it, in the order in which they are fused.
            groups: This rank's key-value groups if the linears are interleaved by them, else 1.
            pairs: Pairs of the targeted linears.
            alpha: Updates are scaled by alpha / rank.
        """
        super().__init__()
        self.entry, self._sizes, self._groups = entry, dict(sizes), groups
        for name, pair in pairs.items():
            self.add_module(name, pair)
        self.alpha: Tensor  # in the state, so that a checkpoint describes its adapters completely
        self.register_buffer("alpha", torch.tensor([alpha]))
        self.configured_alpha = alpha
        self.register_load_state_dict_pre_hook(_require_same_alpha)
        self._rank = next(iter(pairs.values())).lora_A.shape[-2]
        self.scaling = alpha / self._rank

    @property
    def pairs(self) -> dict[str, Pair]:
        """Pairs of the targeted linears, in the order in which they are fused."""
        return {name: cast(Pair, self._modules[name]) for name in self._sizes if name in self._modules}

    def split_dim(self, factor: str) -> int | None:
        """Return the dimension of "lora_A" or "lora_B" that tensor parallelism splits, without the experts'."""
        dim = self.entry.rule.tensor_parallel_dim
        return dim if factor == ("lora_B" if dim == 0 else "lora_A") else None

    @torch.no_grad()
    def merge(self, base: Tensor, read: Read) -> Tensor:
        """Return the weight with its update, added in float32, as a new tensor of the same shape and dtype."""
        if not self.entry.rule.is_expert:
            return (base.float() + self._update(base, None, read)).to(base.dtype)
        result = torch.empty_like(base)
        for expert, weight in enumerate(base):  # float32 copies of one expert at a time
            result[expert] = weight.float() + self._update(weight, expert, read)
        return result

    def _update(self, base: Tensor, expert: int | None, read: Read) -> Tensor:
        """Return a linear's update, [out, in] float32."""
        parts: list[Tensor] = []
        for name, size in self._sizes.items():
            pair = self.pairs.get(name)
            if pair is None:
                parts.append(base.new_zeros(size, base.shape[-1], dtype=torch.float32))
            else:
                a, b = (read(w if expert is None else w[expert]) for w in (pair.lora_A, pair.lora_B))
                parts.append(self.scaling * (b.float() @ a.float()))
        return torch.cat([part.unflatten(0, (self._groups, -1)) for part in parts], 1).flatten(0, 1)

    def _fuse(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Scale and fuse […, out] of each targeted linear to […, all outputs] in Megatron's order."""
        like = next(iter(outputs.values()))
        parts = (
            outputs[name] if name in outputs else like.new_zeros(*like.shape[:-1], size)
            for name, size in self._sizes.items()
        )
        by_group = [part.unflatten(-1, (self._groups, -1)) for part in parts]
        return self.scaling * torch.cat(by_group, -1).flatten(-2)


def _require_same_alpha(adapter: Any, state: Mapping[str, Tensor], prefix: str, *_: object) -> None:
    """Raise before loading adapters whose alpha differs: their factors are wrong under another scaling."""
    stored = int(state[f"{prefix}alpha"])
    if stored != adapter.configured_alpha:
        raise CheckpointError(
            f"{prefix[:-1]}: the checkpoint's adapters have alpha {stored}; expected lora.alpha = "
            f"{adapter.configured_alpha}. Set lora.alpha to {stored}, or start a new run.folder."
        )


class LinearAdapter(Adapter):
    """Adapter of a column- or row-parallel linear."""

    def attach(self, linear: torch.nn.Module) -> None:
        """Add the update to the linear's outputs, and mark how the factors are split."""
        self._is_split = parallel_state.get_tensor_model_parallel_world_size() > 1
        linear.register_forward_hook(lambda _, inputs, output: (output[0] + self(inputs[0]), *output[1:]))
        for pair in self.pairs.values() if self._is_split else ():
            for factor, parameter in pair.named_parameters():
                dim = self.split_dim(factor)
                if dim is None:
                    setattr(parameter, "sequence_parallel", True)  # noqa: B010 - Megatron reads it
                else:
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [s, b, out] to add to the linear's output, from its input [s, b, in]; this rank's parts."""
        factors = {name: pair() for name, pair in self.pairs.items()}
        low = torch.cat([F.linear(hidden, lora_a) for lora_a, _ in factors.values()], -1)
        if self._is_split and self.entry.rule.tensor_parallel_dim == 0:
            low = gather_from_sequence_parallel_region(low)
        elif self._is_split and self.entry.rule.tensor_parallel_dim == 1:
            low = reduce_scatter_to_sequence_parallel_region(low)
        each = zip(factors.items(), low.split(self._rank, -1), strict=True)
        return self._fuse({name: F.linear(part, lora_b) for (name, (_, lora_b)), part in each})

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the factors as shards of the whole ones."""
        state = self.state_dict(prefix="", keep_vars=True)
        dims = {name: self.split_dim(name.rpartition(".")[2]) for name in state}
        split = {name: dim for name, dim in dims.items() if dim is not None}
        return make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets)


class ExpertAdapter(Adapter):
    """Adapter of one of the two stacked weights of `GroupedExperts`."""

    def attach(self, experts: Any, weight_name: str) -> None:
        """Add the update to the product of that weight, and mark how the factors are split."""
        self._group = _group(parallel_state.get_expert_tensor_parallel_group())
        experts.updates[weight_name] = self.forward
        is_replicated = parallel_state.get_expert_model_parallel_world_size() == 1
        for name, parameter in self.named_parameters():
            is_copy = self.split_dim(name.rpartition(".")[2]) is None and self._group.rank() > 0
            marks = {"allreduce": is_replicated, "tensor_model_parallel": True, "shared": is_copy}
            for mark, value in marks.items():  # Megatron sums gradients and norms by these
                setattr(parameter, mark, value)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return [N, out] to add to the product of `rows` [N, in], sorted by expert and ending at `ends`."""
        outputs: dict[str, Tensor] = {}
        for name, pair in self.pairs.items():
            lora_a, lora_b = pair()
            if self._group.size() > 1 and self.entry.rule.tensor_parallel_dim == 0:
                lora_a = with_summed_gradient(lora_a, self._group)
            elif self._group.size() > 1:
                lora_b = with_summed_gradient(lora_b, self._group)
            low = grouped_product(rows, lora_a, ends)
            outputs[name] = grouped_product(low, lora_b, ends)
        return self._fuse(outputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the factors as shards of the whole ones of all experts."""
        state = make_sharded_tensors_for_checkpoint({"alpha": self.alpha}, prefix, {}, sharded_offsets)
        num_axes, group = len(sharded_offsets), _group(parallel_state.get_expert_model_parallel_group())
        for name, parameter in self.named_parameters():
            dim = self.split_dim(name.rpartition(".")[2])
            split = [] if dim is None else [(num_axes + 1 + dim, self._group.rank(), self._group.size())]
            copy = self._group.rank() if dim is None else 0
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                (num_axes, group.rank(), group.size()),
                *split,
                replica_id=(0, copy, parallel_state.get_expert_data_parallel_rank()),
                prepend_axis_num=num_axes,
            )
        return state


def _group(group: Any) -> dist.ProcessGroup:
    """Narrow the type: Megatron annotates its getters of process groups as optional."""
    return group


def add_lora(chunks: Sequence[GPTModel], hf: HFConfig, options: LoraConfig, seed: int) -> None:
    """Freeze the model and add adapters to its targeted linears; call before data-parallel wrapping.

    Factors start as peft's do: A uniform, B zero. They depend on the seed and their own name alone, so that
    every layout starts from the same adapters.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:  # recomputed layers pass gradients on only if their input needs one
            chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
        for layer in cast(Any, chunk.decoder.layers):
            for rule in family_of(hf).rules:
                if set(linears_of(rule)) & set(options.targets):
                    _adapt(layer, rule, hf, options, seed)


def adapters(chunks: Sequence[GPTModel]) -> Iterator[Adapter]:
    """Yield this rank's adapters, in layer order."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Adapter))


def _adapt(layer: Any, rule: WeightRule, hf: HFConfig, options: LoraConfig, seed: int) -> None:
    """Add the rule's adapter to a layer, if it has the weight: a dense layer has no experts."""
    path = rule.megatron.removeprefix("decoder.layers.{layer}.")
    try:
        base = layer.get_parameter(path)
    except AttributeError:
        return
    entry = WeightEntry(rule, layer.layer_number - 1)
    one = torch.empty(base.shape[1:] if rule.is_expert else base.shape, device="meta")
    parts = family_of(hf).weight_table(hf).unfuse(rule, one)
    sizes = {name: part.shape[0] for name, part in zip(linears_of(rule), parts, strict=True)}
    groups = parts[1].shape[0] // model_sizes(hf).head_dim if rule.fusion == "qkv" else 1
    pairs = {
        name: _initial_pair(entry, index, base, size, options.rank, seed)
        for index, (name, size) in enumerate(sizes.items())
        if name in options.targets
    }
    adapter = (ExpertAdapter if rule.is_expert else LinearAdapter)(entry, sizes, groups, pairs, options.alpha)
    adapter.to(base.device)
    owner, _, weight_name = path.rpartition(".")
    parent, _, owner_name = owner.rpartition(".")
    name = f"{owner_name}_{weight_name.removesuffix('_weight')}" if rule.is_expert else owner_name
    layer.get_submodule(parent).add_module(name + ADAPTER_SUFFIX, adapter)
    if isinstance(adapter, ExpertAdapter):
        adapter.attach(layer.get_submodule(owner), weight_name)
    else:
        adapter.attach(layer.get_submodule(owner))
    base.adapter = adapter


def _initial_pair(entry: WeightEntry, index: int, base: Tensor, size: int, rank: int, seed: int) -> Pair:
    """Return this rank's part of the initial LoRA pair for the `index`th Hugging Face linear in `base`."""
    group = _group(parallel_state.get_tensor_model_parallel_group())
    experts: list[int | None] = [None]
    if entry.rule.is_expert:
        group = _group(parallel_state.get_expert_tensor_parallel_group())
        first = parallel_state.get_expert_model_parallel_rank() * base.shape[0]
        experts = [*range(first, first + base.shape[0])]
    part, num_parts = (group.rank(), group.size()) if entry.rule.tensor_parallel_dim == 1 else (0, 1)
    width = base.shape[-1]
    whole = [_uniform(entry.hf_names(expert)[index], rank, width * num_parts, seed) for expert in experts]
    own = torch.stack(whole).narrow(-1, part * width, width)
    lora_a = own if entry.rule.is_expert else own[0]
    return Pair(lora_a.to(base).contiguous(), base.new_zeros(*base.shape[:-2], size, rank))


def _uniform(name: str, rank: int, width: int, seed: int) -> Tensor:
    """Draw [rank, width] between -1/sqrt(width) and 1/sqrt(width): peft's default, and torch's for a linear."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    bound = width**-0.5
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)
