"""A budget for each layer of a training step: operators, waits for the device, and sums in no fixed order.

The figures of a layer are half the difference between a model of four layers and one of two, with attention in
padded batches, as CPUs compute it, and by flash attention, as GPUs do: both give the same gradients.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.runtime.process import Runtime
from tests.support import varlen_reference
from tests.support.ranks import run_ranks
from tests.support.tiny import EXPERTS, TOP_K, VOCAB, write_model

# Counts the operators of a step, and those that would wait for the device. On a CPU none waits.


# They return a number, or as many elements as values say: a host waits for a GPU that runs them.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}
# They read a tensor's memory on a CPU. On a GPU they copy it first, and no operator shows the copy.
_READING = {"tolist", "numpy", "cpu"}
# A GPU adds in any order where an index comes twice.
_ACCUMULATING = {"scatter_add", "scatter_add_", "index_add", "index_add_", "index_put", "index_put_"}
_COUNTED = {"aten", "torch_attn"}
_ALLOCATING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# Sending tokens to experts: the host waits once for how many go where (`to_host` on a CPU).
_DISPATCH = ("token_dispatcher.py", "sort_chunks_by_idxs", "to_host")


@dataclass
class OperatorCount:
    """Operators that a call ran, by name; waits and sums without a fixed order, by the file that calls them."""

    operators: Counter[str] = field(default_factory=Counter[str])
    waits: Counter[str] = field(default_factory=Counter[str])
    unordered: Counter[str] = field(default_factory=Counter[str])

    def waits_outside_dispatch(self) -> dict[str, int]:
        """Waits that do not come from sending tokens to experts."""
        return {place: n for place, n in self.waits.items() if not any(each in place for each in _DISPATCH)}

    def __sub__(self, other: "OperatorCount") -> "OperatorCount":
        return OperatorCount(
            self.operators - other.operators, self.waits - other.waits, self.unordered - other.unordered
        )


def count_operators(step: Callable[[], Any]) -> OperatorCount:
    """Call `step`, and count what it ran, its backward passes included."""
    count = OperatorCount()
    with _Operators(count), _Reads(count):
        step()
    return count


class _Operators(TorchDispatchMode):
    """Counts operators that compute or copy: no views, and nothing that only allocates."""

    def __init__(self, count: OperatorCount) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace in _COUNTED and not func.is_view and name not in _ALLOCATING:
            self._count.operators[name] += 1
            is_of_unknown_size = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
            has_mask = name.startswith("index") and any(map(_is_mask, args[1:2]))
            if name in _WAITING or has_mask or is_of_unknown_size:
                self._count.waits[f"{_place()}: {name}"] += 1
            if name in _ACCUMULATING and args[0].is_floating_point():
                self._count.unordered[f"{_place()}: {name} {args[0].dim()}d"] += 1
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Counts what Python reads of tensors without an operator."""

    def __init__(self, count: OperatorCount) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            self._count.waits[f"{_place()}: {name}"] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(indices: Any) -> bool:
    given = indices if isinstance(indices, (list, tuple)) else [indices]
    return any(torch.is_tensor(index) and index.dtype in (torch.bool, torch.uint8) for index in given)


def _place() -> str:
    """The file and function of the package or of Megatron that called."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/megatron_dppo/" in name or "/megatron/core/" in name:
            return f"{name.rsplit('/', 1)[-1]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


LENGTHS = (3, 3, 7, 12, 20, 31, 50)  # five padded batches
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "context 2": (2, {"context": 2}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2": (2, {"tensor": 2, "expert_tensor": 1}),
    "shared prefixes": (1, {"share_prefixes": True}),
}
# Operators of a layer, forward and backward; on a GPU an RMSNorm is one, not some twenty.
BUDGET = {
    "padded": {
        "one process": 215,
        "context 2": 252,
        "expert 2": 230,
        "tensor 2": 230,
        "shared prefixes": 260,
    },
    "varlen": {
        "one process": 193,
        "context 2": 215,
        "expert 2": 206,
        "tensor 2": 206,
        "shared prefixes": 206,
    },
}


@dataclass(frozen=True)
class Counts:
    """Of one rank, by how attention is computed, and how far the gradients of the two differ."""

    by_form: dict[str, OperatorCount]
    difference: float  # relative, of all
    is_repeatable: bool  # forward and backward again: the same gradients, bit for bit


def count(runtime: Runtime, model: str, num_layers: int, parallel: Mapping[str, Any]) -> Counts:
    """On one rank: the counts of one gradient's accumulation over one micro-batch, with routes replayed."""
    from megatron_dppo.actor import forward
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.packing import microbatches_of
    from megatron_dppo.models.packed_attention import PaddedBatches, VarlenSequences
    from megatron_dppo.types import RoutedExperts, TrainBatch

    varlen_reference.install()
    config = Config.model_validate(
        {
            "model": {"load": model, "dtype": "float32"},
            "parallel": {"max_tokens_per_microbatch": sum(LENGTHS), "share_prefixes": False} | dict(parallel),
            "rollout": {"routing_replay": "replay"},
            "optimizer": {"distributed": False},
        }
    )
    actor = Actor(config, runtime)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    scores = torch.rand(sum(LENGTHS), num_layers, EXPERTS, generator=generator)
    for sequence, of_sequence in zip(sequences, scores.split(LENGTHS), strict=True):
        common = len(sequence) // 2  # with the last one, in tokens and routes
        sequence[:common], of_sequence[:common] = sequences[-1][:common], scores[-LENGTHS[-1] :][:common]
    (scored,) = microbatches_of(sequences, sum(LENGTHS))
    routes = RoutedExperts(scores.topk(TOP_K).indices.to(torch.uint8), tuple(range(num_layers)), EXPERTS)
    ones = torch.ones(sum(LENGTHS))
    microbatch = replace(scored, routed_experts=routes, advantages=ones, token_weights=ones)
    batch = TrainBatch((microbatch,), microbatch.num_loss_tokens * runtime.world_size, len(LENGTHS))
    counts: dict[str, OperatorCount] = {}
    gradients: list[Tensor] = []
    is_repeatable = True
    for name, form in {"padded": PaddedBatches, "varlen": VarlenSequences}.items():
        forward.attention_form = lambda *_, form=form: form
        actor.accumulate_gradients(batch, is_first=True)
        before = _gradients(actor)
        counts[name] = count_operators(lambda: actor.accumulate_gradients(batch, is_first=True))
        gradients.append(_gradients(actor))
        is_repeatable &= torch.equal(gradients[-1], before)
    padded, varlen = gradients
    return Counts(counts, float((varlen - padded).norm() / padded.norm()), is_repeatable)


def _gradients(actor: Any) -> Tensor:
    """[N] float64 of this rank, of all parameters."""
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    return torch.cat([parameter.main_grad.double().flatten() for parameter in parameters])


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def counted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Counts]]:
    """The layout, and the counts of a model of two layers and of one of four."""
    world_size, parallel = LAYOUTS[request.param]
    counts: list[Counts] = []
    for num_layers in (2, 4):
        folder = tmp_path_factory.mktemp("operators")
        model = write_model(folder / "model", num_hidden_layers=num_layers)
        counts += run_ranks(count, world_size, folder, str(model), num_layers, parallel)[:1]
    return request.param, counts


@pytest.fixture(params=BUDGET)
def layer(request: pytest.FixtureRequest, counted: tuple[str, list[Counts]]) -> tuple[int, OperatorCount]:
    """The budget of a layer, and the counts of two layers."""
    layout, (of_two, of_four) = counted
    return BUDGET[request.param][layout], of_four.by_form[request.param] - of_two.by_form[request.param]


def test_a_layer_keeps_to_its_operators(layer: tuple[int, OperatorCount]) -> None:
    budget, two_layers = layer

    assert 0 < two_layers.operators.total() <= 2 * budget, two_layers.operators.most_common()


def test_layer_waits_only_for_the_token_counts_of_experts(
    layer: tuple[int, OperatorCount],
) -> None:
    _, two_layers = layer
    assert two_layers.waits_outside_dispatch() == {}
    assert two_layers.waits.total() <= 2 * 11, "lists of sizes and their order, after one wait"


def test_no_sum_of_a_layer_depends_on_an_order(layer: tuple[int, OperatorCount]) -> None:
    _, two_layers = layer
    # Backward passes of `gather`, which meet each place once: a token's experts differ.
    is_of_gather = {
        place: place.startswith("schedules.py backward_step: scatter_add") for place in two_layers.unordered
    }
    assert all(is_of_gather.values()), two_layers.unordered


def test_both_forms_of_attention_give_the_same_gradients(counted: tuple[str, list[Counts]]) -> None:
    assert all(0 < of_model.difference < 1e-5 for of_model in counted[1])


def test_the_same_gradients_come_again_bit_for_bit(counted: tuple[str, list[Counts]]) -> None:
    assert all(of_model.is_repeatable for of_model in counted[1])
