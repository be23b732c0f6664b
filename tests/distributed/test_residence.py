"""Offloaded optimizer states, and a trainer released while sampling, change no bit of what is trained."""

from typing import Any

import pytest
import torch

from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.tiny import random_groups, write_model

CASES = {
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16, plain optimizer": {"model": {"dtype": "bfloat16"}, "optimizer": {"distributed": False}},
}


def train(runtime: Runtime, model: str, changes: dict[str, Any], is_away: bool) -> dict[str, Any]:
    """Three gradient steps, with a release between them where memory is to be away; and how much was."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    optimizer = {"lr": 1e-2, "offload": is_away} | changes.get("optimizer", {})
    tables = {
        "parallel": {"expert": runtime.world_size, "max_tokens_per_microbatch": 60},
        "optimizer": optimizer,
    }
    config = Config.model_validate({**tables, "model": {"load": model} | changes["model"]})
    actor = Actor(config, runtime)
    has_masters = changes["model"]["dtype"] != "float32"
    assert bool(actor.memory.num_bytes_away) == (is_away and has_masters), "before the first step, too"
    away: list[tuple[int, int]] = []
    for _ in range(3):
        groups = with_advantages(random_groups(4), normalize_std=False)
        own = [s for group in groups[runtime.rank :: runtime.world_size] for s in group.samples]
        shape = BatchShape("token_mean", 16, 60, topk_columns=4, routing=actor.routing)
        (batch,), _ = train_batches([own], shape, actor.data_parallel)
        actor.train_step(batch, is_first=False)
        between = actor.memory.num_bytes_away
        if is_away:
            before = {name: t.clone() for name, t in actor.weights()}
            actor.memory.leave()
            away.append((between, actor.memory.num_bytes_away))
            assert all(p.untyped_storage().nbytes() == 0 for p in actor.chunks[0].parameters())
            sent = {name: t.clone() for name, t in actor.weights()}
            assert sent.keys() == before.keys()
            assert all(torch.equal(tensor, before[name]) for name, tensor in sent.items())
            actor.memory.reload()
    with actor.memory.states_here():
        states = [
            value.clone()
            for member in actor.optimizer.chained_optimizers
            for of_parameter in member.optimizer.state.values()
            for value in of_parameter.values()
            if torch.is_tensor(value)
        ]
    weights = {name: t.clone() for name, t in actor.weights()}
    return {"weights": weights, "states": states, "away": away, "sizes": sizes(actor)}


def sizes(actor: Any) -> dict[str, int]:
    """Bytes of parameters and gradients, padding included."""
    buffers = [b for ddp in actor._ddp for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    return {
        "parameters": sum(p.nbytes for p in actor.chunks[0].parameters()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
    }


def train_both(runtime: Runtime, model: str) -> dict[str, Any]:
    """Each case, as it is and with memory away."""
    return {
        case: {away: train(runtime, model, changes, away) for away in (False, True)}
        for case, changes in CASES.items()
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "expert 2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("residence")
    model = write_model(folder / "model")
    return run_ranks(train_both, request.param, folder, str(model))


@pytest.mark.parametrize("case", CASES)
def test_offloaded_memory_is_restored_bit_for_bit(trained: list[dict[str, Any]], case: str) -> None:
    for of_rank in trained:
        here, away = of_rank[case][False], of_rank[case][True]
        assert here["weights"].keys() == away["weights"].keys()
        assert all(torch.equal(tensor, away["weights"][name]) for name, tensor in here["weights"].items())
        assert len(here["states"]) == len(away["states"]) > 0
        assert all(torch.equal(x, y) for x, y in zip(here["states"], away["states"], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_offloaded_bytes_are_at_least_the_promised_bytes(trained: list[dict[str, Any]], case: str) -> None:
    for of_rank in trained:
        result = of_rank[case][True]
        for between, while_sampling in result["away"]:
            assert between > 0, "moments, and master weights if any, are in host memory"
            assert while_sampling >= between + result["sizes"]["parameters"] + result["sizes"]["gradients"]
