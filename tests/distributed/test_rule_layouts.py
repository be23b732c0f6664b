"""The field's rules and a user's own, on every kind of layout: what one process finds.

Compared are loss, gradients, metrics and shadows. One model is built for each layout, and trained on the same
tokens with one preset after another. Thresholds
are set so that each rule drops some tokens of random data and keeps others, none of them within .1 % of a
threshold: that is tested too.
"""

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.own_rule import Own
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import TrainBatch
from tests.distributed.test_layouts import NUM_LAYERS
from tests.support.ranks import run_ranks
from tests.support.roundoff import COARSEST, OF_LAST_BITS, Error, move_last_bits, relative
from tests.support.tiny import gradients_of, random_groups, write_model

NUM_COLUMNS = 4
OVERRIDES: dict[str, dict[str, Any]] = {
    "ipo": {"delta": 0.01, "log_ratio_coef": 0.05},
    "ipo_2026_08": {"delta": 0.02},
    "drpo": {"delta": 0.05},
    "cppo": {"delta": 0.03, "prefix_delta": 0.005, "prefix_delta_max": 0.02},
    "cppo_topk": {"delta": 0.5, "prefix_delta": 0.3, "prefix_delta_max": 0.7, "top_k": NUM_COLUMNS},
    "sapo": {"ref_kl_coef": 0.05},
    "gspo": {"eps_low": 0.01, "eps_high": 0.7, "ratio_cap": 2.0, "ref_kl_coef": 0.05, "ref_kl": "k1"},
    "icepop": {"rho_low": 0.3, "rho_high": 6.0},
    "mis": {"rho_low": 0.5, "rho_high": 5.0},
    "trm": {"token_kl": 6.0, "response_kl": 2.0, "top_k": NUM_COLUMNS},
    "dppo_topk_kl_predictive": {"delta": 0.3, "top_k": NUM_COLUMNS},
    "estr": {"delta": 0.6, "eps_low": 0.9, "eps_high": 4.0, "top_k": NUM_COLUMNS},
    "sat": {"eps_low": 0.8, "eps_high": 2.0, "stale_share": 0.7},
    "vespo": {"power_low": 0.3, "power_high": 0.2, "decay_low": 0.2, "decay_high": 0.3},
    "gmpo": {"eps_low": 0.5, "eps_high": 0.6},
    "minpro": {"eps_low": 0.9, "eps_high": 3.0},
    "tests.support.own_rules:late": {"rule_options": {"share": 0.617}},
    "tests.support.own_rules:fading": {
        "rule_options": {"delta": 1.5, "steady": 0.5},
        "rule_divergence": "topk_tv",
        "rule_over": "responses",
        "top_k": NUM_COLUMNS,
    },
}
# What these drop of random data.
ONE_SIDED = {"gspo": ["positive"], "dppo_topk_kl_predictive": ["negative"]}
LAYOUTS: dict[int, dict[str, tuple[dict[str, int], str]]] = {
    1: {"one process": ({}, "logits")},
    2: {
        "TP2": ({"tensor": 2}, "hidden_states"),
        "TP2, logits": ({"tensor": 2}, "logits"),
        "CP2": ({"context": 2}, "hidden_states"),
        "CP2, logits": ({"context": 2}, "logits"),
        "PP2": ({"pipeline": 2}, "hidden_states"),
        "EP2": ({"expert": 2}, "hidden_states"),
        "DP2": ({}, "logits"),
    },
    4: {"TP2 CP2": ({"tensor": 2, "context": 2}, "hidden_states")},
}
_LOOSER = {"rho_low": 0.999}
_THRESHOLDS = ("delta_low", "delta_high", "eps_low", "eps_high", "rho_low", "rho_high", "token_kl")
_THRESHOLDS += ("response_kl", "prefix_delta", "prefix_delta_max")


def objectives() -> dict[str, Objective]:
    """By preset."""
    return {name: preset(name, **overrides) for name, overrides in OVERRIDES.items()}


def nudged(objective: Objective, *, is_looser: bool) -> Objective:
    """The objective with all thresholds moved by .1 % to keep more, or to keep less."""
    factors = {name: _LOOSER.get(name, 1 / 0.999) for name in _THRESHOLDS if hasattr(objective, name)}
    power = 1 if is_looser else -1
    if isinstance(objective, Own):
        options = {name: float(value) * 0.999**-power for name, value in objective.function.options}
        return replace(objective, function=replace(objective.function, options=tuple(options.items())))
    return replace(objective, **{name: getattr(objective, name) * f**power for name, f in factors.items()})


def measure(
    runtime: Runtime, model: str, parallel: dict[str, int], loss_from: str, *, is_moved: bool = False
) -> dict[str, tuple[dict[str, Tensor], dict[str, float]]]:
    """By preset: every gradient and every metric, of one model in one layout.

    If `is_moved` is set, the last bits of all weights are moved before.
    """
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.actor.forward import OutputHead
    from megatron_dppo.actor.observation import Observer
    from megatron_dppo.actor.reference import ReferencePolicy
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from megatron_dppo.metrics.metrics import Metrics

    config = Config.model_validate(
        {
            "model": {"load": model, "dtype": "float32", "reference": f"{model}_before"},
            "parallel": parallel | {"max_tokens_per_microbatch": 60},
            "algorithm": {"preset": "mis", "loss_from": loss_from, "logits_chunk_bytes": 3000},
            "rollout": {"num_topk_log_probs": NUM_COLUMNS},
            "optimizer": {"distributed": False},
            "tracking": {"shadow_presets": tuple(OVERRIDES)},
        }
    )
    actor = Actor(config, runtime)
    if is_moved:
        move_last_bits(parameter for chunk in actor.chunks for parameter in chunk.parameters())
    groups = with_advantages(random_groups(8, moe_layers=NUM_LAYERS), normalize_std=False)
    own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
    shape = BatchShape("token_mean", 16, 60, topk_columns=NUM_COLUMNS, routing=actor.routing)
    (batch,), _ = train_batches([own], shape, actor.data_parallel)
    batch = _moved(actor.with_old_log_probs(batch))
    (batch,) = ReferencePolicy(actor, config).with_log_probs([batch])
    shadows: dict[str, Objective] = {}
    for name, objective in objectives().items():
        shadows[name] = objective
        if runtime.world_size == 1:  # which tokens are near a threshold does not depend on the layout
            shadows[f"{name}.looser"] = nudged(objective, is_looser=True)
            shadows[f"{name}.tighter"] = nudged(objective, is_looser=False)
    found: dict[str, tuple[dict[str, Tensor], dict[str, float]]] = {}
    for name, objective in objectives().items():
        actor.objective = objective
        observer = Observer(objective, config.tracking, num_topk_log_probs=NUM_COLUMNS)
        observer.shadows = shadows
        head = OutputHead(
            actor.chunks,
            objective,
            config.algorithm,
            temperature=1.0,
            vocab_size=actor.hf["vocab_size"],
            reported_topk=observer.topk_columns,
        )
        actor._observer, actor._head = observer, head
        step = actor.accumulate_gradients(batch, is_first=False)
        assert step.faults == ()
        gradients = gradients_of(actor)
        metrics = Metrics().merge(runtime.all_gather(step.metrics.state())).values()
        found[name] = gradients, {k: v for k, v in metrics.items() if not k.startswith("theory/")}
    return found


def _moved(batch: TrainBatch) -> TrainBatch:
    """Old log-probs that differ from the new ones, by the same amount for a token wherever it is."""
    moved = [
        replace(m, old_log_probs=(m.old_log_probs + 0.5 * (1000 * m.rollout_log_probs).sin()).clamp(max=0))
        for m in batch.microbatches
        if m.old_log_probs is not None
    ]
    return replace(batch, microbatches=tuple(moved))


def write_reference(runtime: Runtime, model: str, folder: str) -> dict[str, dict[str, float]]:
    """What one process finds: the gradients in a file, with all roundoffs, and the metrics by preset."""
    found = measure(runtime, model, *LAYOUTS[1]["one process"])
    moved = measure(runtime, model, *LAYOUTS[1]["one process"], is_moved=True)
    roundoffs = {
        name: _errors(moved[name][0], gradients) | _errors(moved[name][1], metrics)
        for name, (gradients, metrics) in found.items()
    }
    torch.save((found, roundoffs), f"{folder}/found.pt")
    return {name: metrics for name, (_, metrics) in found.items()}


def compare(runtime: Runtime, model: str, folder: str) -> list[str]:
    """What differs from one process by more than rounding, in all layouts of so many processes."""
    expected, roundoffs = torch.load(f"{folder}/found.pt")
    for _, metrics in expected.values():
        for name in [name for name in metrics if ".looser/" in name or ".tighter/" in name]:
            del metrics[name]
    problems: list[str] = []
    for layout, settings in LAYOUTS[runtime.world_size].items():
        print(layout, flush=True)  # in the log of a spawn that hangs
        found = measure(runtime, model, *settings)
        for name, (gradients, metrics) in expected.items():
            of_layout = found[name]
            assert of_layout[0].keys() == gradients.keys() and of_layout[1].keys() == metrics.keys()
            for key, value in (_errors(of_layout[0], gradients) | _errors(of_layout[1], metrics)).items():
                error = Error.of(value, roundoffs[name][key], OF_LAST_BITS)
                if not error.value <= error.limit < COARSEST:
                    problems.append(f"{layout} {name} {key}: {error}")
        gc.collect()  # the threads of process groups end with the last reference to them
    return problems


def _errors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """By name, relative; of metrics near 0 of 1e-3, and of a loss, which has terms of both signs, of 1."""
    errors: dict[str, float] = {}
    for name, value in expected.items():
        if isinstance(value, Tensor):
            errors[name] = relative(found[name], value)
        else:
            errors[name] = abs(found[name] - value) / max(abs(value), 1.0 if name == "loss/policy" else 1e-3)
    return errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    write_model(folder / "model", num_hidden_layers=NUM_LAYERS)
    write_model(folder / "model_before", seed=1, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, float]]:
    """What one process measures, by the preset that trains."""
    return run_ranks(write_reference, 1, folder, str(folder / "model"), str(folder))[0]


@pytest.mark.parametrize("name", OVERRIDES)
def test_each_rule_acts_and_no_token_is_near_a_threshold(alone: dict[str, dict[str, float]], name: str) -> None:
    metrics = alone[name]
    if objectives()[name].is_soft:
        weights = [metrics[f"trust_region/weight_{sign}"] for sign in ("positive", "negative")]
        assert all(abs(weight - 1) > 0.01 for weight in weights)
    else:
        assert 0.05 < metrics[f"shadow/{name}/masked_fraction"] < 0.95
        dropped = [sign for sign in ("positive", "negative") if metrics[f"trust_region/masked_fraction_{sign}"]]
        assert dropped == ONE_SIDED.get(name, ["positive", "negative"])
        assert "trust_region/weight_positive" not in metrics
    for other in ("looser", "tighter"):
        assert metrics[f"shadow/{name}.{other}/masked_fraction"] == metrics[f"shadow/{name}/masked_fraction"]


def test_a_shadow_is_what_training_with_the_rule_reports(alone: dict[str, dict[str, float]]) -> None:
    for trained, metrics in alone.items():
        for name in OVERRIDES:
            for sign in ("positive", "negative"):
                own = alone[name][f"trust_region/masked_fraction_{sign}"]
                assert metrics[f"shadow/{name}/masked_fraction_{sign}"] == own, (trained, name)
        assert metrics[f"shadow/{trained}/agreement"] == 1.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rule_equals_one_process_in_every_layout(
    folder: Path, alone: dict[str, dict[str, float]], world_size: int
) -> None:
    logs = folder / f"spawn{world_size}"
    logs.mkdir()
    assert run_ranks(compare, world_size, logs, str(folder / "model"), str(folder))[0] == []
