"""Each family on a separate server: completions, pushes by each way, and a run that trains on them."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.rollout.rollouts import build_engine
from tests.sglang.family_job import push_every_way, push_from_bfloat16, push_parted
from tests.support.comparing import FULL, PARITY, compare, requests_of, router_choices
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import settings
from tests.support.served_families import CASES_SERVED, IN_CI, model_of, served_tables, write_served_case
from tests.support.serving import ROOT, START_TIMEOUT_S, Served
from tests.support.sync_job import WAYS

ROLLOUTS = 2


@dataclass(frozen=True)
class Family:
    """A server, and the run that it belongs to."""

    served: Served
    tables: dict[str, dict[str, Any]]  # the run's config

    @property
    def has_routes(self) -> bool:
        return self.tables["rollout"]["routing_replay"] != "off"

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters with every output."""
        return replace(FULL, capture_routes=self.has_routes)

    def worst(self, answered: dict[str, Any], weights: Path) -> float:
        """Largest difference of the server's log-probs and top-20 from transformers'; routes must be equal."""
        served = replace(self.served, model=model_of(self.served.folder, weights / "model.safetensors"))
        return max(compare(served, answered["requests"], answered["completions"], self.params))


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in IN_CI else pytest.mark.slow) for case in CASES_SERVED],
)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, environment: None
) -> Iterator[Family]:
    task = tmp_path_factory.mktemp("family")
    folder, tables = write_served_case(task, request.param), served_tables(task, request.param)
    run = task / "run"
    server = Server(plan_launch(Config.model_validate(tables)), run / "servers", "own")
    try:
        record = server.start(START_TIMEOUT_S)
        assert record is not None
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        yield Family(Served(record.url, folder, model, run), tables)
    finally:
        server.stop(grace_s=0)


def test_log_probs_topk_and_routes_equal_a_forward_pass(family: Family) -> None:
    served = family.served
    engine = build_engine(Config.model_validate(family.tables), served.folder, torch.device("cpu"))
    requests = requests_of("first", num_prompts=4, samples=4, length=24)
    worst, worst_topk = compare(served, requests, engine.generate(requests, family.params), family.params)
    print(f"log-probs {worst:.1e}, top-20 {worst_topk:.1e}")
    assert worst <= PARITY
    assert worst_topk <= PARITY


def test_later_turns_continue_from_the_server_s_cache(family: Family) -> None:
    """Keys and values, or a recurrent state: what follows equals a forward pass of the whole."""
    served, params = family.served, replace(family.params, max_response_tokens=9)
    engine = build_engine(Config.model_validate(family.tables), served.folder, torch.device("cpu"))
    requests, num_cached = requests_of("turns", num_prompts=2, samples=2, length=17), list[int]()
    for _ in range(3):
        completions = engine.generate(requests, params)
        assert max(compare(served, requests, completions, params)) <= PARITY
        num_cached.append(sum(completion.num_cached_tokens for completion in completions))
        said = zip(requests, completions, strict=True)
        requests = [replace(r, prompt_tokens=(*r.prompt_tokens, *c.tokens.tolist(), 5, 7)) for r, c in said]
    print(f"tokens of the cache, by turn: {num_cached}")
    assert num_cached[1] > 0 and num_cached[2] > num_cached[1]


def test_pushed_weights_are_served(family: Family, tmp_path: Path) -> None:
    (results,) = run_ranks(push_every_way, 1, tmp_path, family.tables, family.params, str(tmp_path), 11)
    for way in WAYS:
        pushed = results[way]
        assert "The server does not hold the trainer's weights" in pushed["stale"]
        assert pushed["metrics"]["sync/probe_abs_diff_max"] <= PARITY
        assert pushed["metrics"].get("sync/probe_experts_not_reached", 0) == 0
        spans = {span.version for completion in pushed["completions"] for span in completion.weight_versions}
        assert spans == {pushed["version"]}
        worst = family.worst(pushed, tmp_path / way)
        print(f"{way}: {worst:.1e}")
        assert worst <= PARITY


def test_a_bfloat16_trainer_s_expert_biases_are_pushed_in_float32(family: Family, tmp_path: Path) -> None:
    """They lie within one step of bfloat16: rounded, all are 7, and other experts are chosen."""
    weights = tmp_path / "weights"
    (pushed,) = run_ranks(push_from_bfloat16, 1, tmp_path, family.tables, family.params, str(weights), 21)
    assert family.worst(pushed, weights) <= PARITY
    model = model_of(family.served.folder, weights / "model.safetensors")
    tokens = torch.tensor([request.prompt_tokens for request in pushed["requests"]])
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    before = experts_of(model, tokens)
    for bias in biases:
        assert bias.unique().numel() == bias.numel() and bias.bfloat16().unique().tolist() == [7.0]
        bias.fill_(7.0)
    after = experts_of(model, tokens)
    moved = [float((x != y).any(-1).float().mean()) for x, y in zip(before, after, strict=True)]
    print(f"tokens that rounded biases send elsewhere, by layer: {moved}")
    assert all(share > 0.02 for share in moved) or not biases


@torch.no_grad()
def experts_of(model: Any, tokens: Tensor) -> list[Tensor]:
    """[tokens, top_k] of each layer with experts."""
    with router_choices(model) as choices:
        model(tokens)
    return [choice.experts for choice in choices]


def test_probe_finds_a_pair_of_tensors_that_a_server_dropped(family: Family, tmp_path: Path) -> None:
    """A server reports that it has loaded the two tensors of a pair, and keeps the old ones."""
    (parted,) = run_ranks(push_parted, 1, tmp_path, family.tables, family.params, str(tmp_path), 31)
    pairs = len(parted["together"]) > len(set(parted["together"].values()))
    held = "before" if pairs else "after"
    assert ("The server does not hold the trainer's weights" in parted["raised"]) == pairs, parted["raised"]
    assert family.worst(parted, tmp_path / held) <= PARITY


def test_a_run_trains_on_the_server_s_routes(family: Family) -> None:
    task, sglang = family.served.folder.parent, family.tables["rollout"]["sglang"]
    rollout = family.tables["rollout"] | {"sglang": sglang | {"sync_bucket_bytes": 50_000}}
    tables = settings(
        task,
        "run",
        run={"num_rollouts": ROLLOUTS},
        data={"reward": "tests.faults.rewards:by_text"},
        rollout=rollout,
        sglang=family.tables["sglang"],
    )
    config = task / "run.toml"
    config.write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "megatron_dppo", "train", config]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics_of(family.served.run)
    rollouts = [row for row in lines if row["kind"] == "rollout"]
    assert len(rollouts) == ROLLOUTS
    for row in rollouts:
        assert row["rollout/dropped_samples"] == 0
        assert row["mismatch/abs_prob_diff_mean"] <= 1e-6
        assert row["sync/probe_abs_diff_max"] <= PARITY
        assert ("routing/agreement_mean" in row) == family.has_routes
        assert row.get("routing/agreement_mean", 1.0) >= 0.99  # experts may tie
    assert any(row["optimizer/grad_norm"] > 0 for row in lines if row["kind"] == "step")
