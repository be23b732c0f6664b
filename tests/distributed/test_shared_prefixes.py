"""Prefixes that are forwarded once give the losses, gradients and log-probs of every sample alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import Microbatch
from tests.support import varlen_reference
from tests.support.ranks import run_ranks
from tests.support.roundoff import relative
from tests.support.tiny import random_groups
from tests.support.tiny_families import write_family

LIMIT = 1e-5
ROUTER_LOSSES = {
    "moe_z_loss_coeff": 0.02,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WITH_STATES = [
    name for name, family in FAMILIES.items() if any(rule.mixers == "linear" for rule in family.rules)
]
"""Refused: a sequence does not start from the recurrent state of another one's prefix."""
# A rule over complete responses, another anchor with a reference, adapters: each on one family.
CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    name: (name, {}) for name in FAMILIES if name not in ("Qwen3MoeForCausalLM", *WITH_STATES)
} | {
    "router losses": ("Qwen3MoeForCausalLM", {"megatron": ROUTER_LOSSES}),
    "routes, recomputed": (
        "Qwen3MoeForCausalLM",
        {"rollout": {"routing_replay": "replay"}, "megatron": RECOMPUTE | ROUTER_LOSSES},
    ),
    "routes of the anchor": (
        "Qwen3MoeForCausalLM",
        {"algorithm": {"preset": "minirl_tis", "replay_recomputed_routes": True}},
    ),
    "routes, measured": ("Qwen3MoeForCausalLM", {"rollout": {"routing_replay": "measure"}}),
    "rule over responses": ("Qwen2ForCausalLM", {"algorithm": {"preset": "gspo"}}),
    "old log-probs and a reference": (
        "DeepseekV3ForCausalLM",
        {"algorithm": {"preset": "minirl_tis", "ref_kl_coef": 0.1}, "rollout": {"routing_replay": "replay"}},
    ),
    "adapters": ("Qwen3MoeForCausalLM", {"lora": {"rank": 4, "alpha": 8}}),
}


def measure(
    runtime: Runtime, folder: Path, tables: dict[str, dict[str, Any]], dtype: str = "float32"
) -> dict[bool, dict[str, Any]]:
    """One gradient step on one process, with prefixes shared and with each sample alone."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.actor.reference import ReferencePolicy
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    varlen_reference.install()
    found: dict[bool, dict[str, Any]] = {}
    for is_shared in (False, True):
        config = Config.model_validate(
            {"model": {"load": str(folder), "dtype": dtype}, "optimizer": {"distributed": False}}
            | tables
            | {"parallel": {"share_prefixes": is_shared}}
        )
        actor = Actor(config, runtime)
        for chunk in actor.chunks:  # adapters begin with zeros
            for index, (name, parameter) in enumerate(chunk.named_parameters()):
                if "lora" in name:
                    generator = torch.Generator().manual_seed(index)
                    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        groups = with_advantages(random_groups(5, 4, routing=actor.routing, has_trees=True), False)
        samples = [sample for group in groups for sample in group.samples]
        if actor.routing is None:
            samples = [replace(sample, routed_experts=None) for sample in samples]
        sequences = [sample.tokens for sample in samples]
        # The same micro-batches: only the forward pass may differ.
        shape = BatchShape("token_mean", 16, 200, topk_columns=4, routing=actor.routing)
        (batch,), _ = train_batches([samples], shape, actor.data_parallel)
        if config.algorithm.ref_kl_coef:
            (batch,) = ReferencePolicy(actor, config).with_log_probs([batch])
        if actor.objective.anchor == "recomputed":
            batch = actor.with_old_log_probs(batch)
        rows = _count_rows(actor)
        step = actor.accumulate_gradients(batch, is_first=True, weight_version=3)
        parameters: list[Any] = [p for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad]
        tokens = actor.token_log_probs(batch, step.metrics, is_replaying=False, has_score_norms=True)
        paired = {}
        if actor.captured_routing is not None:
            paired = actor.paired_mismatch(batch).values()
        found[is_shared] = {
            "gradients": [parameter.main_grad.clone() for parameter in parameters],
            "metrics": step.metrics.values() | paired,
            "tokens": torch.cat(tokens),
            "log_probs": torch.cat(actor.log_probs(sequences)),
            "inputs": [m.old_log_probs for m in batch.microbatches]
            + [m.ref_log_probs for m in batch.microbatches],
            "faults": step.faults,
            "rows": rows,
            "tokens in the loss": [m.num_loss_tokens for m in batch.microbatches],
        }
    return found


def _count_rows(actor: Any) -> list[int]:
    """A list to which the number of rows of each micro-batch's loss is added."""
    rows, policy_loss = list[int](), actor._head.policy_loss

    def counted(output: Any, scored: Microbatch, *others: Any) -> Any:
        rows.append(scored.targets.numel())
        return policy_loss(output, scored, *others)

    actor._head.policy_loss = counted
    return rows


def measure_all(runtime: Runtime, folder: str) -> dict[str, dict[bool, dict[str, Any]]]:
    return {case: measure(runtime, Path(folder) / family, tables) for case, (family, tables) in CASES.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[bool, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("prefixes")
    for family in {family for family, _ in CASES.values()}:
        write_family(folder / family, family)
    return run_ranks(measure_all, 1, folder, str(folder))[0]


@pytest.mark.parametrize("case", CASES)
def test_shared_prefixes_train_like_samples_alone(
    measured: dict[str, dict[bool, dict[str, Any]]], case: str
) -> None:
    alone, shared = measured[case][False], measured[case][True]
    assert alone["faults"] == shared["faults"] == ()
    assert shared["rows"] == shared["tokens in the loss"] == alone["tokens in the loss"]
    assert all(few < all_of_them for few, all_of_them in zip(shared["rows"], alone["rows"], strict=True))
    errors = [relative(*pair) for pair in zip(shared["gradients"], alone["gradients"], strict=True)]
    assert 0 < max(errors) < LIMIT, "not the same computation, but the same gradients"
    for name in ("tokens", "log_probs"):
        torch.testing.assert_close(shared[name], alone[name], rtol=1e-4, atol=1e-5)
    for one, other in zip(shared["inputs"], alone["inputs"], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert set(shared["metrics"]) == set(alone["metrics"])
    for name, value in alone["metrics"].items():
        assert shared["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
