"""Looks up weight rules by Megatron parameter name; fuses, splits and joins Hugging Face tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_dppo.architectures.sizes import ModelSizes
from megatron_dppo.architectures.weight_map import MEGATRON_LAYER, WeightEntry, WeightRule
from megatron_dppo.errors import ConversionError


class WeightTable:
    """Rules of one model family, looked up by Megatron parameter name."""

    def __init__(self, rules: Iterable[WeightRule], sizes: ModelSizes, names: Iterable[str]) -> None:
        """Store the rules, the model's sizes, and its Megatron names in the order of an export."""
        self._rules: Mapping[str, WeightRule] = {rule.megatron: rule for rule in rules}
        self._transformer_engine: Mapping[str, WeightRule] = {
            rule.transformer_engine: rule for rule in self._rules.values() if rule.transformer_engine
        }
        self.order: Mapping[str, int] = {name: index for index, name in enumerate(names)}
        self.sizes = sizes

    def entry(self, megatron_name: str) -> WeightEntry:
        """Return the rule of a parameter by its name in a model on one process, in either layer spec."""
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", megatron_name)
        key = f"{MEGATRON_LAYER}{match[2]}" if match else megatron_name
        layer = int(match[1]) if match else None
        of_engine = re.sub(r"(\.experts\.linear_fc[12]\.weight)\d+$", r"\1{local}", key)
        if of_engine in self._transformer_engine:
            return WeightEntry(self._transformer_engine[of_engine], layer, is_one_expert=of_engine != key)
        if key not in self._rules:
            raise ConversionError(
                f"Megatron parameter {megatron_name!r} is not in the weight table, "
                f"which has {sorted(self._rules)}. "
                "Add a rule to architectures/weight_map.py and list it in the model's family."
            )
        return WeightEntry(self._rules[key], layer)

    def fuse(self, rule: WeightRule, tensors: Sequence[Tensor], num_parts: int = 1) -> Tensor:
        """Fuse Hugging Face tensors, or parts of them, into the Megatron parameter (of one expert).

        Args:
            rule: Rule of the parameter.
            tensors: Tensors in the order of `rule.hf`, all with the same part of the parameter.
            num_parts: Number of equal parts that the tensor-parallel dimension is split into.
        """
        if rule.fusion == "one":
            return tensors[0]
        if rule.fusion == "concatenate":
            return torch.cat(list(tensors))
        groups, columns = self._groups(rule) // num_parts, tensors[0].shape[1:]
        each = zip(tensors, rule.section_rows(self.sizes), strict=True)
        sections = [part for t, rows in each for part in t.split([n // num_parts for n in rows])]
        return torch.cat([t.reshape(groups, -1, *columns) for t in sections], dim=1).reshape(-1, *columns)

    def unfuse(self, rule: WeightRule, tensor: Tensor) -> list[Tensor]:
        """Split a Megatron parameter into its Hugging Face tensors, in the order of `rule.hf`; often views."""
        if rule.fusion == "one":
            return [tensor]
        if rule.fusion == "concatenate":
            return list(tensor.chunk(2))
        groups, rows, columns = self._groups(rule), rule.section_rows(self.sizes), tensor.shape[1:]
        of_group = [n // groups for of_tensor in rows for n in of_tensor]
        parts = tensor.reshape(-1, sum(of_group), *columns).split(of_group, dim=1)
        sections = iter([part.reshape(-1, *columns) for part in parts])
        of_tensors = [[next(sections) for _ in of_tensor] for of_tensor in rows]
        return [found[0] if len(found) == 1 else torch.cat(found) for found in of_tensors]

    def _groups(self, rule: WeightRule) -> int:
        """Return the number of groups that an interleaved parameter's rows belong to."""
        if rule.fusion == "qkv":
            return self.sizes.num_key_value_heads
        assert self.sizes.linear is not None, "only models with linear attention have such a rule"
        return self.sizes.linear.num_key_heads

    def part(self, rule: WeightRule, index: int, tensor: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's part of the `index`th Hugging Face tensor, split into `size` equal parts.

        A vocabulary is padded with zeros for equal parts.
        """
        dim = rule.tensor_parallel_dim
        if size == 1 or dim is None:
            return tensor
        if rule.sections is not None:
            sections = tensor.split(rule.section_rows(self.sizes)[index])
            return torch.cat([section.chunk(size)[rank] for section in sections])
        width = -(-tensor.shape[dim] // size)
        if not rule.is_vocabulary:
            return tensor.narrow(dim, rank * width, width)
        own = tensor[rank * width : (rank + 1) * width]
        return torch.cat([own, own.new_zeros(width - own.shape[0], *own.shape[1:])])

    def join(self, rule: WeightRule, index: int, parts: Sequence[Tensor]) -> Tensor:
        """Join the `index`th Hugging Face tensor from its ranks' parts, without the padding of a vocabulary."""
        if rule.tensor_parallel_dim is None or len(parts) == 1:
            whole = parts[0]
        elif rule.sections is not None:
            rows = [n // len(parts) for n in rule.section_rows(self.sizes)[index]]
            by_section = zip(*(part.split(rows) for part in parts), strict=True)
            whole = torch.cat([part for section in by_section for part in section])
        else:
            whole = torch.cat(list(parts), dim=rule.tensor_parallel_dim)
        return whole[: self.sizes.vocab_size] if rule.is_vocabulary else whole
