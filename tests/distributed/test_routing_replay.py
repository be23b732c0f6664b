"""R3 and R2 on every family with experts: routers replay what was chosen, and nothing is left behind."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.tiny import EXPERTS, TOP_K, logits_of
from tests.support.tiny_families import write_family

LAYOUTS = {"one process": (1, {}), "expert 2": (2, {"expert": 2})}
ARCHITECTURES = [name for name, family in FAMILIES.items() if any(rule.is_expert for rule in family.rules)]


def measure_all(runtime: Runtime, folder: str, parallel: dict[str, int]) -> list[dict[str, Any]]:
    """Every family with experts, in one process per rank."""
    return [measure(runtime, f"{folder}/{name}", parallel) for name in ARCHITECTURES]


def measure(runtime: Runtime, model: str, parallel: dict[str, int]) -> dict[str, Any]:
    """A float32 engine and the actor, with equal weights, on what the engine sampled."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches
    from megatron_dppo.engines.weight_sync.syncs import InProcessSync
    from megatron_dppo.rollout.rollouts import build_engine
    from megatron_dppo.routing_replay.replay import replaying, routers

    results: dict[str, Any] = {}
    for mode in ("off", "measure", "replay"):
        config = Config.model_validate(
            {
                "model": {"load": model, "dtype": "float32"},
                "parallel": parallel,
                "rollout": {"routing_replay": mode, "transformers": {"weights": "float32"}},
            }
        )
        actor = Actor(config, runtime)
        engine = build_engine(config, Path(model), runtime.device)
        InProcessSync(actor.weights, engine, runtime).push(version=3)
        samples = sample(engine, runtime.rank)
        results["weight versions"] = {s.weight_versions[0].version for s in samples}
        routing = actor.routing if mode != "off" else None
        shape = BatchShape("token_mean", 16, 200, routing=routing)
        (batch,), _ = train_batches([samples], shape, actor.data_parallel)
        metrics = actor.accumulate_gradients(batch, is_first=True).metrics.values()
        results[mode] = metrics
    assert routing is not None
    results["layers"] = routing.layer_numbers
    results["recorded"] = records_the_same(actor, batch)
    before = [router.router_replay for router in routers(actor.chunks[0]).values()]
    microbatch = batch.microbatches[0]
    own = logits_of(actor, microbatch)
    with replaying(actor.chunks, is_replaying=True, is_measuring=False) as replay:
        replay.follow(other_routes(microbatch.routed_experts), microbatch.loss_mask.long())
        results["other experts change the output"] = float((logits_of(actor, microbatch) - own).abs().max())
    results["restored output"] = bool(torch.equal(logits_of(actor, microbatch), own))
    after = [router.router_replay for router in routers(actor.chunks[0]).values()]
    results["restored routers"] = all(x is y for x, y in zip(before, after, strict=True))
    results |= anchor_of_other_experts(actor, batch)
    from megatron.core.transformer.moe.router_replay import RouterReplay

    results["global registry"] = len(RouterReplay.global_router_replay_instances)
    results["gradient of the router"] = router_gradient_error(actor, microbatch)
    return results


def sample(engine: Any, rank: int) -> list[Any]:
    """A few real samples of the engine, with routes, as scored samples."""
    from megatron_dppo.engines.base import Request, SamplingParams
    from megatron_dppo.types import Sample

    requests = [Request(f"{rank}/{i}", (5 + i, 7, 11 + rank), (0, 0, 10 * rank + i)) for i in range(6)]
    completions = engine.generate(requests, SamplingParams(max_response_tokens=12, capture_routes=True))
    return [
        Sample(
            id=c.request_id,
            group_id="g",
            tokens=torch.cat([torch.tensor(r.prompt_tokens), c.tokens]),
            prompt_length=3,
            loss_mask=torch.ones(c.tokens.numel(), dtype=torch.bool),
            rollout_log_probs=c.log_probs,
            finish_reason=c.finish_reason,
            routed_experts=c.routed_experts,
            weight_versions=c.weight_versions,
            reward=0.0,
            advantage=1.0 if i % 2 else -1.0,
        )
        for i, (r, c) in enumerate(zip(requests, completions, strict=True))
    ]


def records_the_same(actor: Any, batch: Any) -> bool:
    """R2 finds the experts that an equal engine chose; an engine forwards no sequence's last token."""
    recorded = actor.with_recorded(batch)
    for found, captured in zip(recorded.microbatches, batch.microbatches, strict=True):
        is_last = torch.zeros_like(captured.tokens, dtype=torch.bool)
        is_last[captured.cu_seqlens[1:].long() - 1] = True
        rows = [each.routed_experts.indices[~is_last].sort(-1).values for each in (found, captured)]
        if captured.sample_ids and not torch.equal(*rows):
            return False
    return True


def anchor_of_other_experts(actor: Any, batch: Any) -> dict[str, float]:
    """Distance of the loss's policy from the recomputed anchor before any step, and from mu, by other experts.

    The anchor replaces mu here, because the mismatch is measured from it.
    """
    moved = batch.with_column("routed_experts", [other_routes(m.routed_experts) for m in batch.microbatches])
    anchor = [m.old_log_probs for m in actor.with_old_log_probs(moved).microbatches]
    found = [
        actor.accumulate_gradients(each, is_first=True).metrics.values()
        for each in (moved.with_column("rollout_log_probs", anchor), moved)
    ]
    from_anchor, from_mu = (each.get("mismatch/abs_prob_diff_mean", math.nan) for each in found)
    return {"from the anchor": from_anchor, "from mu": from_mu}


def other_routes(routes: Any) -> Any:
    """Each token sent to the next experts."""
    from dataclasses import replace

    return replace(routes, indices=(routes.indices + TOP_K) % EXPERTS)


def router_gradient_error(actor: Any, microbatch: Any) -> float:
    """Autograd through a replayed router against a central difference, along one random direction.

    Relative to the gradient's norm, which the slope is in the mean square: a direction may be nearly level.
    """
    from megatron_dppo.actor.forward import forward_packed, output_weight
    from megatron_dppo.routing_replay.replay import replaying, routers

    weight = next(iter(routers(actor.chunks[0]).values())).weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        replay.follow(microbatch.routed_experts, microbatch.loss_mask.long())
        logits = forward_packed(actor.chunks[0], microbatch)[0] @ output_weight(actor.chunks[0]).T
        return logits.double().log_softmax(-1)[:, 3].mean()

    with replaying(actor.chunks, is_replaying=True, is_measuring=False) as replay:
        (gradient,) = torch.autograd.grad(loss(), weight)
        step = 1e-3
        with torch.no_grad():
            weight.add_(step * direction)
            above = loss()
            weight.sub_(2 * step * direction)
            below = loss()
            weight.add_(step * direction)
    slope = float((gradient * direction).sum())
    return abs(slope - float((above - below) / (2 * step))) / float(gradient.norm())


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world_size, parallel = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("r3")
    for name in ARCHITECTURES:
        write_family(folder / name, name)
    of_ranks = run_ranks(measure_all, world_size, folder, str(folder), parallel)
    return [result for of_rank in of_ranks for result in of_rank]


@pytest.mark.parametrize("mode", ["measure", "replay"])
def test_equal_engines_agree_on_every_expert(measured: list[dict[str, Any]], mode: str) -> None:
    for result in measured:
        agreement = {name: value for name, value in result[mode].items() if name.startswith("routing/")}
        assert set(agreement) == {"routing/agreement_mean"} | {
            f"routing/agreement_layer_{layer}" for layer in result["layers"]
        }
        assert set(agreement.values()) == {1.0}
        assert result[mode]["mismatch/abs_prob_diff_mean"] < 1e-6


def test_off_reports_no_agreement(measured: list[dict[str, Any]]) -> None:
    for result in measured:
        assert not any(name.startswith("routing/") for name in result["off"])
        if "mismatch/abs_prob_diff_mean" in result["off"]:
            assert result["off"]["mismatch/abs_prob_diff_mean"] < 1e-6


def test_the_trainer_records_what_an_equal_engine_chose(measured: list[dict[str, Any]]) -> None:
    assert all(result["recorded"] for result in measured)


def test_replaying_other_experts_changes_the_output_and_is_undone(measured: list[dict[str, Any]]) -> None:
    for result in measured:
        assert result["other experts change the output"] > 1e-2
        assert result["restored output"]
        assert result["restored routers"]
        assert result["global registry"] == 0, "no model joins Megatron's global registry"


def test_the_recomputed_anchor_replays_the_experts_that_the_loss_replays(
    measured: list[dict[str, Any]],
) -> None:
    """Without a number on ranks that have no sample to measure."""
    found = [result for result in measured if not math.isnan(result["from mu"])]
    assert len(found) >= len(ARCHITECTURES)
    for result in found:
        assert result["from the anchor"] < 1e-6 and result["from mu"] > 1e-3


def test_replayed_router_keeps_its_gradient(measured: list[dict[str, Any]]) -> None:
    assert max(result["gradient of the router"] for result in measured) < 5e-3


def test_samples_carry_the_pushed_weight_version(measured: list[dict[str, Any]]) -> None:
    assert all(result["weight versions"] == {3} for result in measured)
