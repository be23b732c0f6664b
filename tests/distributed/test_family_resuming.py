"""Every family: a killed run resumes bitwise, and its checkpoint is equal in another layout."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.runtime.process import Runtime
from tests.distributed import test_resharding
from tests.distributed.test_resharding import NUM_BEFORE, stored
from tests.distributed.test_training_run import train, train_each
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.roundoff import FLOOR
from tests.support.sanity_run import TOKENS, add_task, settings, without_clocks
from tests.support.tiny import random_groups
from tests.support.tiny_families import write_family

WITH_EXPERTS = {name for name, family in FAMILIES.items() if any(rule.is_expert for rule in family.rules)}
WITH_BIAS = {name for name, family in FAMILIES.items() if any(rule.is_buffer for rule in family.rules)}
RATE = 0.001
"""Of expert biases, which move in each step here: a checkpoint's are not those that the run began with."""
families = pytest.mark.parametrize("name", FAMILIES)


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Config tables of a family: R3 if it has routes, bias updates if it has router biases."""
    return {
        "rollout": {"routing_replay": "replay" if name in WITH_EXPERTS else "off"},
        "megatron": {"moe_router_bias_update_rate": RATE} if name in WITH_BIAS else {},
    }


# A run that is killed in its third gradient step, after a checkpoint of the second.


def run_tables(task: Path, run: str) -> dict[str, Any]:
    """Two rollouts of two gradient steps, with a reward that varies."""
    options = options_of(task.name)
    size = {"prompts_per_rollout": 2, "max_response_tokens": 6}
    return settings(
        task,
        run,
        run={"num_rollouts": 2},
        data={"reward": "tests.faults.rewards:by_text"},
        checkpoint={"every": 1, "asynchronous": False},
        **options | {"rollout": options["rollout"] | size},
    )


def train_until_killed(runtime: Runtime, tables: dict[str, Any]) -> None:
    """Train until this process kills itself, as nothing can prepare for."""

    def watch(training: Any) -> None:
        step, done = training.actor.train_step, list[int]()

        def step_or_die(*arguments: Any, **options: Any) -> Any:
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(1)
            return step(*arguments, **options)

        training.actor.train_step = step_or_die

    train(runtime, tables, watch=watch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any], dict[str, Any]]]:
    """Each family's task, and what its whole run and its resumed one ended with."""
    folder = tmp_path_factory.mktemp("runs")
    for name in FAMILIES:
        write_family(folder / name / "model", name, num_hidden_layers=2, **TOKENS)
        tables = run_tables(add_task(folder / name), "killed")
        run_ranks(train_until_killed, 1, folder, tables, exit_code=-signal.SIGKILL)
    tables = [run_tables(folder / name, run) for name in FAMILIES for run in ("whole", "killed")]
    (results,) = run_ranks(train_each, 1, folder, tables)
    pairs = zip(results[::2], results[1::2], strict=True)
    return {name: (folder / name, *pair) for name, pair in zip(FAMILIES, pairs, strict=True)}


@families
def test_killed_and_resumed_run_is_bitwise_equal(runs: dict[str, Any], name: str) -> None:
    task, whole, resumed = runs[name]
    assert 0 < len(resumed["forwards"]) < len(whole["forwards"]), "it went on, and not from the beginning"
    assert resumed["state"] == whole["state"] and whole["state"].step == 4
    assert whole["weights"].keys() == resumed["weights"].keys()
    assert all(torch.equal(tensor, resumed["weights"][each]) for each, tensor in whole["weights"].items())
    assert len(whole["moments"]) == len(resumed["moments"]) > 0
    assert all(torch.equal(x, y) for x, y in zip(whole["moments"], resumed["moments"], strict=True))
    assert without_clocks(metrics_of(task / "killed")) == without_clocks(metrics_of(task / "whole"))
    before = HFWeights(task / "model")
    kept = [each for each, tensor in whole["weights"].items() if torch.equal(before.tensor(each), tensor)]
    assert kept == [], "every weight is learned, and every bias has moved"
    assert any(map(stays_float32, whole["weights"])) == (name in WITH_BIAS)


# Checkpoints of one layout, loaded on another.

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "PP2": (2, {"pipeline": 2}),  # of three layers: one stage has two
    "TP2 PP2 EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 1}),
}
PAIRS = [
    ("TP2 EP2", "PP2"),
    pytest.param("PP2", "TP2 EP2", marks=pytest.mark.slow),
    pytest.param("TP2 PP2 EP2", "one process", marks=pytest.mark.slow),
    pytest.param("one process", "TP2 PP2 EP2", marks=pytest.mark.slow),
]


def build(runtime: Runtime, model: str, layout: str) -> Any:
    """An actor on a layout; of a dense model, on what the layout leaves to split."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config

    name, sizes = Path(model).parent.name, LAYOUTS[layout][1]
    parallel = {of: size for of, size in sizes.items() if name in WITH_EXPERTS or "expert" not in of}
    tables: dict[str, Any] = {
        "model": {"load": model, "dtype": "float32"},
        "parallel": parallel | {"max_tokens_per_microbatch": 60},
        "optimizer": {"lr": 1e-2, "eps": 1e-2},
    }
    return Actor(Config.model_validate(tables | options_of(name)), runtime)


def save_all(runtime: Runtime, folder: str, source: str) -> dict[str, list[float]]:
    """Train each family on a layout, save, and train on: the losses after the save."""
    test_resharding.build = build
    found: dict[str, list[float]] = {}
    for name in FAMILIES:
        own = f"{folder}/{name}"
        found[name] = test_resharding.save_all(runtime, f"{own}/model", own, [source])[source]
    return found


def load_all(runtime: Runtime, folder: str, source: str, target: str) -> dict[str, Any]:
    """Load each family's checkpoint of one layout on another."""
    test_resharding.build = build
    found: dict[str, Any] = {}
    for name in FAMILIES:
        own, pair = f"{folder}/{name}", [(source, target)]
        (found[name],) = test_resharding.load_all(runtime, f"{own}/model", own, [target], pair).values()
    return found


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_is_the_same_in_another_layout(tmp_path: Path, source: str, target: str) -> None:
    for name in FAMILIES:
        write_family(tmp_path / name / "model", name)
    saved, *_ = run_ranks(save_all, LAYOUTS[source][0], tmp_path, str(tmp_path), source)
    loaded, *_ = run_ranks(load_all, LAYOUTS[target][0], tmp_path, str(tmp_path), source, target)
    for name in FAMILIES:
        assert not isinstance(loaded[name], str), f"{name}: {loaded[name]}"
        changed, later, step = loaded[name]
        assert changed == [], f"{name}: not bitwise the same, gathered whole"
        assert step == NUM_BEFORE
        assert later == pytest.approx(saved[name], rel=1e-5, abs=FLOOR), name  # sums of terms of order one
        before = HFWeights(tmp_path / name / "model")
        tensors = stored(tmp_path / name / source / f"step_{NUM_BEFORE:08d}")
        biases = {key: bias for key, bias in tensors.items() if key.endswith("expert_bias")}
        assert bool(biases) == (name in WITH_BIAS)
        for key, bias in biases.items():
            numbers = re.findall(r"\d+", key)  # none: Megatron stores equal layers in one tensor
            names = [rule.hf[0] for rule in FAMILIES[name].rules if rule.is_buffer]
            layers = numbers or range(len(bias))
            began = [before.tensor(each.format(layer=layer)) for each in names for layer in layers]
            of_layers = [bias] if numbers else list(bias)
            for old, new in zip(began, of_layers, strict=True):
                assert not torch.equal(new, old), f"{name}: the bias has not moved"


def reference_of_each(runtime: Runtime, folder: str) -> dict[str, dict[str, bool]]:
    """Compute log-probs of the reference policy before and after the policy moves, for each family."""
    from megatron_dppo.actor.reference import ReferencePolicy
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    found: dict[str, dict[str, bool]] = {}
    for name in FAMILIES:
        actor = build(runtime, f"{folder}/{name}/model", "one process")
        policy = ReferencePolicy(actor, actor._config)
        (batch,), _ = train_batches(
            [[s for g in with_advantages(random_groups(4, routing=actor.routing), False) for s in g.samples]],
            BatchShape("token_mean", 16, 60, topk_columns=4, routing=actor.routing),
            actor.data_parallel,
        )

        def log_probs(policy: Any = policy, batch: Any = batch) -> torch.Tensor:
            (of_step,) = policy.with_log_probs([batch])
            return torch.cat([microbatch.ref_log_probs for microbatch in of_step.microbatches])

        first = log_probs()
        test_resharding.losses(runtime, actor, 2)
        before = {each: tensor.clone() for each, tensor in actor.weights()}
        later = log_probs()
        after = dict(actor.weights())
        own = torch.cat(actor.forward_log_probs(batch.microbatches, is_replaying=False))
        found[name] = {
            "the reference is fixed": torch.equal(first, later),
            "the policy is unchanged by it": all(torch.equal(before[each], after[each]) for each in before),
            "the policy has moved": not torch.equal(own, first),
        }
    return found


def test_the_reference_policy_is_fixed_while_the_policy_moves(tmp_path: Path) -> None:
    """Its buffers too: the router's biases of some families move without a gradient."""
    for name in FAMILIES:
        write_family(tmp_path / name / "model", name)
    (found,) = run_ranks(reference_of_each, 1, tmp_path, str(tmp_path))
    assert found.keys() == FAMILIES.keys() >= WITH_BIAS > set()
    assert [(name, what) for name, facts in found.items() for what, holds in facts.items() if not holds] == []
