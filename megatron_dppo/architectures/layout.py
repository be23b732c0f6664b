"""Defines parallel layouts (sizes of the process groups), and refuses unproven or indivisible ones.

A layout is accepted only if its kind is in `PROVEN`: tests show that a layout with the same split dimensions
gives the loss, gradients and updates of one process. Pure Python, so that `megatron-dppo check` is fast.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_dppo.architectures.sizes import ModelSizes
from megatron_dppo.errors import LayoutError, Problem

if TYPE_CHECKING:
    from megatron_dppo.config.schema import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """Sizes of the process groups; experts regroup the same processes as `expert_tensor x expert x data`."""

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1

    @classmethod
    def of(cls, parallel: "ParallelConfig", world_size: int) -> "Layout":
        """Return the layout of `[parallel]` on `world_size` processes."""
        problems = list(_world_size_problems(parallel, world_size))
        if problems:
            raise LayoutError(problems)
        return cls(
            world_size=world_size,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=_expert_tensor(parallel),
            data=world_size // (parallel.tensor * parallel.pipeline * parallel.context),
        )

    def __str__(self) -> str:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "virtual_pipeline": self.virtual_pipeline}
        sizes |= {"context": self.context, "expert": self.expert}
        if self.expert_tensor != self.tensor:
            sizes["expert_tensor"] = self.expert_tensor
        split = " and ".join(f"parallel.{key} = {size}" for key, size in sizes.items() if size > 1)
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        return f"{processes} with {split or 'every parallel size 1'}"


@dataclass(frozen=True)
class LayoutKind:
    """Dimensions that a layout splits, whatever the sizes; any kind can be combined with data parallelism."""

    split: frozenset[str]  # of "tensor", "pipeline", "virtual_pipeline", "context", "expert"
    expert_tensor: str  # "whole" experts, "as tensor", or "alone": split although the rest of the layer is not

    def __str__(self) -> str:
        experts = {"whole": "", "as tensor": " with split experts", "alone": " with experts alone split"}
        return (" + ".join(sorted(self.split)) or "data alone") + experts[self.expert_tensor]


def kind_of(layout: Layout) -> LayoutKind | None:
    """Return the kind of a layout; None if experts and the rest are split into different numbers of parts."""
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
    split = frozenset(name for name in names if getattr(layout, name) > 1)
    if layout.expert_tensor == 1:
        return LayoutKind(split, "whole")
    if layout.expert_tensor == layout.tensor:
        return LayoutKind(split, "as tensor")
    return LayoutKind(split, "alone") if layout.tensor == 1 else None


def _kind(*split: str, expert_tensor: str = "") -> LayoutKind:
    return LayoutKind(frozenset(split), expert_tensor or ("as tensor" if "tensor" in split else "whole"))


PROVEN: frozenset[LayoutKind] = frozenset(
    {
        _kind(),
        _kind("tensor"),
        _kind("expert"),
        _kind("context"),
        _kind("pipeline"),
        _kind("pipeline", "virtual_pipeline"),
        _kind("tensor", "expert"),
        _kind("tensor", "expert", expert_tensor="whole"),
        _kind("expert", expert_tensor="alone"),
        _kind("tensor", "pipeline"),
        _kind("tensor", "context"),
        _kind("tensor", "context", "expert", expert_tensor="whole"),
        _kind("pipeline", "expert"),
        _kind("pipeline", "virtual_pipeline", "expert"),
        _kind("pipeline", "context"),
        _kind("context", "expert"),
        _kind("tensor", "pipeline", "expert"),
        _kind("tensor", "pipeline", "expert", expert_tensor="whole"),
        _kind("tensor", "context", "pipeline"),
        _kind("pipeline", "virtual_pipeline", "context", "expert"),
        _kind("tensor", "pipeline", "virtual_pipeline"),
        _kind("tensor", "pipeline", "virtual_pipeline", "expert", expert_tensor="whole"),
        _kind("pipeline", "virtual_pipeline", "context"),
        _kind("tensor", "context", "pipeline", "expert", expert_tensor="whole"),
    }
)
"""Kinds of layouts that the distributed tests compare with one process: loss, gradients and updates."""


def is_admitted(parallel: "ParallelConfig", world_size: int, sizes: ModelSizes | None) -> bool:
    """Whether `layout_problems` finds no problem, without its search for the nearest proven layout."""
    problems = itertools.chain(
        _world_size_problems(parallel, world_size),
        _wrong_in_megatron(parallel, sizes, ""),
        () if sizes is None else _division_problems(parallel, sizes, ""),
    )
    return next(problems, None) is None and kind_of(Layout.of(parallel, world_size)) in PROVEN


def layout_problems(parallel: "ParallelConfig", world_size: int, sizes: ModelSizes | None) -> list[Problem]:
    """Return all problems of `[parallel]` on this many processes: wrong, unproven, or indivisible.

    Args:
        parallel: The configured sizes.
        world_size: Number of processes.
        sizes: Model's sizes. None skips the rules that depend on them.
    """
    if is_admitted(parallel, world_size, sizes):
        return []
    nearest = f"Use {_nearest(parallel, world_size, sizes)}."
    indivisible = [] if sizes is None else list(_division_problems(parallel, sizes, nearest))
    too_few = list(_world_size_problems(parallel, world_size))
    if indivisible:  # more processes would not help
        too_few = [replace(problem, action="Choose sizes that divide the model first.") for problem in too_few]
    problems = [*indivisible, *too_few, *_wrong_in_megatron(parallel, sizes, nearest)]
    if problems:
        return problems
    layout = Layout.of(parallel, world_size)
    expected = "a split of one of the proven kinds: " + "; ".join(sorted(map(str, PROVEN)))
    return [Problem("parallel", f"{layout}, not proven equal to one process yet", expected, nearest)]


def _expert_tensor(parallel: "ParallelConfig") -> int:
    return parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor


def _world_size_problems(parallel: "ParallelConfig", world_size: int) -> Iterator[Problem]:
    dense = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % dense:
        where = "parallel.tensor * pipeline * context"
        expected = f"a divisor of the {world_size} processes"
        yield Problem(where, str(dense), expected, f"Start a multiple of {dense} processes.")
    experts = _expert_tensor(parallel) * parallel.expert * parallel.pipeline
    if world_size % experts:
        where = "parallel.expert * expert_tensor * pipeline"
        expected = f"a divisor of the {world_size} processes"
        yield Problem(where, str(experts), expected, f"Start a multiple of {experts} processes.")


def _wrong_in_megatron(parallel: "ParallelConfig", sizes: ModelSizes | None, nearest: str) -> Iterator[Problem]:
    expert_tensor = _expert_tensor(parallel)
    if parallel.expert == 1 and expert_tensor != parallel.tensor:
        found = f"{expert_tensor} with parallel.tensor = {parallel.tensor} and parallel.expert = 1"
        expected = "the same as parallel.tensor: Megatron's expert gradients are silently wrong otherwise"
        yield Problem("parallel.expert_tensor", found, expected, nearest)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        found = f"{parallel.virtual_pipeline} with parallel.pipeline = 1"
        yield Problem("parallel.virtual_pipeline", found, "1 without a pipeline", nearest)
    if sizes is not None and sizes.num_experts is None and parallel.expert > 1:
        found = f"{parallel.expert} for a dense model"
        yield Problem("parallel.expert", found, "1", nearest)
    if sizes is not None and sizes.linear_layers and parallel.context > 1:
        found = f"{parallel.context} for a model with linear attention"
        expected = "1: ranks would have to pass recurrent states and the convolution's inputs to each other"
        yield Problem("parallel.context", found, expected, nearest)


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return the layers of each pipeline stage; None if a stage would have no layer.

    If the stages do not divide the layers, the first and the last stage get fewer layers than the others,
    because they also have the embedding and the output layer. The last stage gets at most as many as the first.
    """
    of_others, rest = divmod(num_layers, num_stages)
    if not rest:
        return (of_others,) * num_stages
    of_others += 1
    at_ends = num_layers - of_others * (num_stages - 2)
    if at_ends < 2:
        return None
    return (-(-at_ends // 2), *(of_others,) * (num_stages - 2), at_ends // 2)


def _division_problems(parallel: "ParallelConfig", sizes: ModelSizes, nearest: str) -> Iterator[Problem]:
    yield from _stage_problems(parallel, sizes.num_layers, nearest)
    tensor, expert_tensor = parallel.tensor, _expert_tensor(parallel)
    divisions = [
        ("parallel.tensor", tensor, "attention heads", sizes.num_attention_heads),
        ("parallel.tensor", tensor, "key-value heads", sizes.num_key_value_heads),
        ("parallel.tensor", tensor, "hidden size", sizes.hidden_size),
    ]
    if sizes.linear is not None:
        divisions.append(
            ("parallel.tensor", tensor, "key heads of linear attention", sizes.linear.num_key_heads)
        )
    shared = sizes.shared_expert_intermediate_size
    divisions.append(("parallel.tensor", tensor, "shared experts' width", shared))
    if len(sizes.moe_layers) < sizes.num_layers:
        divisions.append(("parallel.tensor", tensor, "feed-forward width", sizes.intermediate_size))
    if sizes.num_experts is not None:
        divisions.append(("parallel.expert", parallel.expert, "experts", sizes.num_experts))
        divisions.append(("parallel.expert_tensor", expert_tensor, "expert width", sizes.moe_intermediate_size))
    for where, size, name, total in divisions:
        if total % size:
            divisors = ", ".join(map(str, _divisors(total))) if total <= 512 else ""
            expected = f"a divisor of the model's {name}, {total}" + (f" ({divisors})" if divisors else "")
            yield Problem(where, str(size), expected, nearest)


def _stage_problems(parallel: "ParallelConfig", num_layers: int, nearest: str) -> Iterator[Problem]:
    stages = parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1:
        is_divided, of = num_layers % stages == 0, "a divisor of"
    else:
        is_divided = layers_of_stages(num_layers, stages) is not None
        of = "so many that the first and the last stage, which get the fewest layers, have some of"
    if not is_divided:
        divisors = ", ".join(map(str, _divisors(num_layers)))
        expected = f"{of} the model's layers, {num_layers} (divisors: {divisors})"
        yield Problem("parallel.pipeline * virtual_pipeline", str(stages), expected, nearest)


def _nearest(parallel: "ParallelConfig", world_size: int, sizes: ModelSizes | None) -> Layout:
    """Return the proven layout of `world_size` processes that changes the user's choices least."""
    wanted = (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context, parallel.expert)
    best: tuple[tuple[int, int], Layout] | None = None
    for choice in itertools.product(*map(_divisors, wanted)):
        kept = choice[0] if parallel.expert_tensor is None else parallel.expert_tensor
        for expert_tensor in dict.fromkeys((kept, choice[0], 1)):
            names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
            candidate = parallel.model_copy(
                update={**dict(zip(names, choice, strict=True)), "expert_tensor": expert_tensor}
            )
            if not is_admitted(candidate, world_size, sizes):
                continue
            num_changed = sum(a != b for a, b in zip(wanted, choice, strict=True))
            changed = num_changed + (expert_tensor != kept), -math.prod(choice)
            if best is None or changed < best[0]:
                best = changed, Layout.of(candidate, world_size)
    assert best is not None, "pure data parallelism is proven and divides everything"
    return best[1]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
