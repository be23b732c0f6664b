"""A budget for each layer of a training step: operators, waits for the device, and sums in no fixed order.

The figures of a layer are half the difference between a model of four layers and one of two.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from operator_count import OperatorCount, count_operators
from ranks import run_ranks
from tiny import EXPERTS, TOP_K, VOCAB, write_model

from megatron_dppo.runtime.process import Runtime

LENGTHS = (3, 3, 7, 12, 20, 31, 50)  # five padded batches
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "context 2": (2, {"context": 2}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2": (2, {"tensor": 2, "expert_tensor": 1}),
}
# Operators of a layer, forward and backward; on a GPU an RMSNorm is one, not some twenty.
BUDGET = {"one process": 225, "context 2": 250, "expert 2": 230, "tensor 2": 230}


def count(runtime: Runtime, model: str, num_layers: int, parallel: Mapping[str, int]) -> OperatorCount:
    """On one rank: the counts of one gradient's accumulation over one micro-batch, with routes replayed."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.packing import microbatches_of
    from megatron_dppo.types import RoutedExperts, TrainBatch

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
    actor.accumulate_gradients(batch, is_first=True)
    return count_operators(lambda: actor.accumulate_gradients(batch, is_first=True))


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, OperatorCount]:
    """The layout, and the counts of two layers."""
    world_size, parallel = LAYOUTS[request.param]
    counts: list[OperatorCount] = []
    for num_layers in (2, 4):
        folder = tmp_path_factory.mktemp("operators")
        model = write_model(folder / "model", num_hidden_layers=num_layers)
        counts += run_ranks(count, world_size, folder, str(model), num_layers, parallel)[:1]
    return request.param, counts[1] - counts[0]


def test_a_layer_keeps_to_its_operators(layer: tuple[str, OperatorCount]) -> None:
    layout, two_layers = layer
    assert 0 < two_layers.operators.total() <= 2 * BUDGET[layout], two_layers.operators.most_common()


def test_a_layer_waits_for_nothing_but_the_sizes_of_what_goes_to_experts(
    layer: tuple[str, OperatorCount],
) -> None:
    _, two_layers = layer
    assert two_layers.waits_outside_dispatch() == {}
    assert two_layers.waits.total() <= 2 * 10, "lists of sizes, after one wait"


def test_no_sum_of_a_layer_depends_on_an_order(layer: tuple[str, OperatorCount]) -> None:
    _, two_layers = layer
    # Backward passes of `gather`, which meet each place once: a token's experts differ.
    is_of_gather = {
        place: place.startswith("schedules.py backward_step: scatter_add") for place in two_layers.unordered
    }
    assert all(is_of_gather.values()), two_layers.unordered
