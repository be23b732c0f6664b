"""Shadow masks of a gradient step: what training with each preset reports, and the same on two processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import Microbatch, SampleGroup
from tests.support.ranks import run_ranks
from tests.support.tiny import random_groups, write_model

TRAINED = ("dppo_topk_kl", "grpo_clip_higher", "dppo_binary_kl", "negative_mask", "minirl_tis")
NUM_COLUMNS = 4
LAYOUTS: dict[str, dict[str, int]] = {"CP2": {"context": 2}, "DP2": {}}


def measure(runtime: Runtime, model: str, parallel: dict[str, int], presets: tuple[str, ...]) -> Any:
    """By the preset that trains: every metric of one gradient step, over all ranks."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from megatron_dppo.metrics.metrics import Metrics

    found: dict[str, dict[str, float]] = {}
    for name in presets:
        config = Config.model_validate(
            {
                "model": {"load": model, "dtype": "float32"},
                "parallel": parallel | {"max_tokens_per_microbatch": 60},
                "algorithm": {"preset": name} | ({"top_k": NUM_COLUMNS} if "topk" in name else {}),
                "rollout": {"num_topk_log_probs": NUM_COLUMNS},
            }
        )
        actor = Actor(config, runtime)
        groups = with_advantages([_far_away(group) for group in random_groups(5)], normalize_std=False)
        own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
        shape = BatchShape("token_mean", 16, 60, topk_columns=NUM_COLUMNS, routing=actor.routing)
        (batch,), _ = train_batches([own], shape, actor.data_parallel)
        if actor.objective.anchor == "recomputed":
            moved = [_moved(microbatch) for microbatch in actor.with_old_log_probs(batch).microbatches]
            batch = replace(batch, microbatches=tuple(moved))
        step = actor.accumulate_gradients(batch, is_first=False)
        assert step.faults == ()
        found[name] = Metrics().merge(runtime.all_gather(step.metrics.state())).values()
    return found


def _far_away(group: SampleGroup) -> SampleGroup:
    """The group sampled by a policy that is far from the model on either side, so that masks have work."""
    generator = torch.Generator().manual_seed(group.index)
    samples = [
        replace(sample, rollout_log_probs=-7 * torch.rand(sample.response_length, generator=generator))
        for sample in group.samples
    ]
    return replace(group, samples=tuple(samples))


def _moved(microbatch: Microbatch) -> Microbatch:
    """Old log-probs that differ from the new ones, by the same amount for a token wherever it is."""
    assert microbatch.old_log_probs is not None
    shift = (1000 * microbatch.rollout_log_probs).sin()
    return replace(microbatch, old_log_probs=(microbatch.old_log_probs + shift).clamp(max=0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """What one process measures, by the preset that trains."""
    return run_ranks(measure, 1, tmp_path_factory.mktemp("alone"), model, {}, TRAINED)[0]


def test_a_shadow_is_what_training_with_it_reports(alone: dict[str, dict[str, float]]) -> None:
    """The same batch and weights: whoever trains, each preset masks the same."""
    for trained, metrics in alone.items():
        for name in TRAINED:
            if name == "minirl_tis" and trained != name:
                assert f"shadow/{name}/agreement" not in metrics, "no log-probs were recomputed for it"
                continue
            for sign in ("positive", "negative"):
                own = alone[name][f"trust_region/masked_fraction_{sign}"]
                assert metrics[f"shadow/{name}/masked_fraction_{sign}"] == own, (trained, name)
        assert metrics[f"shadow/{trained}/agreement"] == 1.0
        assert metrics["shadow/pg_is/dropped_mass_fraction"] == 0.0
        for name in set(TRAINED) - {"minirl_tis"}:
            assert 0 < metrics[f"shadow/{name}/masked_fraction"] < 1, name
        in_all = metrics["shadow/pg_is/agreement"] + metrics[f"shadow/{trained}/masked_fraction"]
        assert in_all == pytest.approx(1.0)


def measure_layouts(runtime: Runtime, model: str) -> dict[str, dict[str, float]]:
    """By layout: the shadows' metrics, with log-probs recomputed before the step."""
    found = {
        name: measure(runtime, model, layout, ("minirl_tis",))["minirl_tis"] for name, layout in LAYOUTS.items()
    }
    return {name: _of_shadows(metrics) for name, metrics in found.items()}


def _of_shadows(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("shadow/")}


def test_two_processes_report_what_one_does(
    model: str, alone: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    expected = _of_shadows(alone["minirl_tis"])
    assert len(expected) == 18 * 5 and expected["shadow/minirl/masked_fraction_positive"] > 0
    for result in run_ranks(measure_layouts, 2, tmp_path, model):
        for layout, found in result.items():
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), layout
