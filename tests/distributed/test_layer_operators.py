"""A budget for each layer of a training step: operators, waits for the device, and sums in no fixed order.

The figures of a layer are half the difference between a model of four layers and one of two, with attention in
padded batches, as CPUs compute it, and by flash attention, as GPUs do: both give the same gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.runtime.process import Runtime
from tests.distributed.operator_count import OperatorCount, count_operators
from tests.support import varlen_reference
from tests.support.ranks import run_ranks
from tests.support.tiny import EXPERTS, TOP_K, VOCAB, write_model

LENGTHS = (3, 3, 7, 12, 20, 31, 50)  # five padded batches
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "context 2": (2, {"context": 2}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2": (2, {"tensor": 2, "expert_tensor": 1}),
}
# Operators of a layer, forward and backward; on a GPU an RMSNorm is one, not some twenty.
BUDGET = {
    "padded": {"one process": 215, "context 2": 245, "expert 2": 230, "tensor 2": 230},
    "varlen": {"one process": 193, "context 2": 215, "expert 2": 206, "tensor 2": 206},
}


@dataclass(frozen=True)
class Counts:
    """Of one rank, by how attention is computed, and how far the gradients of the two differ."""

    by_form: dict[str, OperatorCount]
    difference: float  # relative, of all
    is_repeatable: bool  # forward and backward again: the same gradients, bit for bit


def count(runtime: Runtime, model: str, num_layers: int, parallel: Mapping[str, int]) -> Counts:
    """On one rank: the counts of one gradient's accumulation over one micro-batch, with routes replayed."""
    from megatron_dppo.actor import forward
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.packing import microbatches_of
    from megatron_dppo.models.padded_attention import PaddedBatches
    from megatron_dppo.models.varlen_attention import VarlenSequences
    from megatron_dppo.types import RoutedExperts, TrainBatch

    varlen_reference.install()
    config = Config.model_validate(
        {
            "model": {"load": model, "dtype": "float32"},
            "parallel": {"max_tokens_per_microbatch": sum(LENGTHS)} | dict(parallel),
            "rollout": {"routing_replay": "replay"},
            "optimizer": {"distributed": False},
        }
    )
    actor = Actor(config, runtime)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]
    (scored,) = microbatches_of(sequences, sum(LENGTHS))
    scores = torch.rand(sum(LENGTHS), num_layers, EXPERTS, generator=generator)
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


def test_a_layer_waits_for_nothing_but_the_sizes_of_what_goes_to_experts(
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
