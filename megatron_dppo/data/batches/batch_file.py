"""Reads and writes gradient steps as a safetensors file, for checkpoints in the middle of a rollout."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_dppo.errors import DataError
from megatron_dppo.runtime.files import save_tensors
from megatron_dppo.types import Microbatch, RolloutTopK, RoutedExperts, TrainBatch

_LAYOUT = "steps"  # metadata key of the description that assigns tensors to steps
_NESTED = ("topk", "routed_experts", "sample_ids")
_PLAIN = tuple(field.name for field in fields(Microbatch) if field.name not in _NESTED)


def write_batches(path: Path, steps: Sequence[TrainBatch]) -> None:
    """Write gradient steps without pickle. `read_batches` returns the same bits.

    Tensors are named `<step>.<micro-batch>.<field>`. The file's metadata contains counts, the layer numbers of
    routes and the sample ids as JSON.
    """
    tensors: dict[str, Tensor] = {}
    layout: list[dict[str, object]] = []
    for i, step in enumerate(steps):
        for j, microbatch in enumerate(step.microbatches):
            named = dict(_tensors(microbatch))
            tensors |= {f"{i}.{j}.{name}": tensor.contiguous().clone() for name, tensor in named.items()}
        routes = next((m.routed_experts for m in step.microbatches if m.routed_experts is not None), None)
        layout.append(
            {
                "num_microbatches": len(step.microbatches),
                "num_loss_tokens": step.num_loss_tokens,
                "num_samples": step.num_samples,
                "layer_numbers": None if routes is None else list(routes.layer_numbers),
                "num_experts": None if routes is None else routes.num_experts,
                "sample_ids": [list(microbatch.sample_ids) for microbatch in step.microbatches],
            }
        )
    save_tensors(tensors, path, metadata={_LAYOUT: json.dumps(layout)})


def read_batches(path: Path) -> tuple[TrainBatch, ...]:
    """Read gradient steps written by `write_batches`.

    Raises:
        DataError: The file is missing, torn, or of another kind.
    """
    try:
        opened: Any = safe_open(path, "pt")
        with opened as file:
            layout: list[dict[str, Any]] = json.loads(file.metadata()[_LAYOUT])
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in list(file.keys())}
        return tuple(_step(tensors, i, **entry) for i, entry in enumerate(layout))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: found {type(error).__name__}: {error}; expected gradient steps of a rollout. "
            "The file is torn or of another kind; resume from an earlier checkpoint."
        ) from error


def bytes_of(step: TrainBatch) -> int:
    """Return the size of a gradient step's tensors in bytes."""
    return sum(tensor.nbytes for microbatch in step.microbatches for _, tensor in _tensors(microbatch))


def _tensors(microbatch: Microbatch) -> Iterator[tuple[str, Tensor]]:
    for name in _PLAIN:
        tensor = getattr(microbatch, name)
        if tensor is not None:
            yield name, tensor
    if microbatch.topk is not None:
        yield "topk.ids", microbatch.topk.ids
        yield "topk.log_probs", microbatch.topk.log_probs
    if microbatch.routed_experts is not None:
        yield "routed_experts.indices", microbatch.routed_experts.indices


def _step(
    tensors: dict[str, Tensor],
    index: int,
    *,
    num_microbatches: int,
    num_loss_tokens: int,
    num_samples: int,
    layer_numbers: list[int] | None,
    num_experts: int | None,
    sample_ids: Sequence[Sequence[str]] = (),
) -> TrainBatch:
    microbatches: list[Microbatch] = []
    for j in range(num_microbatches):
        prefix = f"{index}.{j}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        plain: dict[str, Any] = {name: own[name] for name in _PLAIN if name in own}
        microbatch = Microbatch(**plain, sample_ids=tuple(sample_ids[j]) if sample_ids else ())
        if "topk.ids" in own:
            microbatch = replace(microbatch, topk=RolloutTopK(own["topk.ids"], own["topk.log_probs"]))
        if layer_numbers is not None and num_experts is not None:
            routes = RoutedExperts(own["routed_experts.indices"], tuple(layer_numbers), num_experts)
            microbatch = replace(microbatch, routed_experts=routes)
        microbatches.append(microbatch)
    return TrainBatch(tuple(microbatches), num_loss_tokens, num_samples)
