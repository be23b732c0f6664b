"""What `plan` admits, calls fitting or proposes is what `train` starts with: both use the same rules.

`check` runs in full here, with prompts, weights and tokenizer in place: only the run itself can be at fault.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.checks import AT_ONCE, Facts, check, megatron_rules, model_facts
from megatron_dppo.config import Config, load_config
from megatron_dppo.plan import Machine, make_plan
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.search import HEADROOM, divisible_layouts, propose
from megatron_dppo.plan.units import Settings, as_overrides
from tests.support.plan_models import GB, QWEN3_8B, QWEN3_30B

BASE = """
[model]
load = "{model}"
[data]
reward = "arithmetic"
[parallel]
tensor = {tensor}
expert = {expert}
expert_tensor = {tensor}
max_tokens_per_microbatch = 20480
[rollout]
engine = "sglang"
prompts_per_rollout = 64
max_response_tokens = 8192
[algorithm]
minibatches_per_rollout = 2
"""
CONFIGS = {
    "experts": BASE.format(model="moe", tensor=1, expert=8),
    "dense": BASE.format(model="dense", tensor=4, expert=1),
}
NUMBERS = (1, 6, 8, 16, 24, 1024)
CHANGES: list[Settings] = [
    {},
    {"parallel.tensor": 8},
    {"parallel.tensor": 4, "parallel.expert_tensor": 1},
    {"parallel.tensor": 4, "parallel.context": 2, "parallel.expert": 8, "parallel.expert_tensor": 1},
    {"parallel.tensor": 2, "parallel.context": 2, "parallel.pipeline": 2, "parallel.virtual_pipeline": 2},
    {"parallel.pipeline": 5},
    {"parallel.expert": 3, "parallel.expert_tensor": 1},
    {"rollout.prompts_per_rollout": 48},
    {"rollout.prompts_per_rollout": 63},
    {"parallel.max_tokens_per_microbatch": 8192},
    {"rollout.max_response_tokens": 40000, "parallel.max_tokens_per_microbatch": 65536},
    {"rollout.max_data_gib": 0.05},
    {"model.layer_spec": "torch", "parallel.context": 4},
    {"lora.rank": 4},
    {"rollout.routing_replay": "replay"},
    {"megatron.num_layers_in_first_pipeline_stage": 6},
    {"rollout.sglang.colocated": True},
    {"optimizer.min_lr": 1.0},
]


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory from which either model could be trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(megatron_rules, "megatron_fields", lambda: None)
    monkeypatch.setattr(Facts, "free_bytes", 10**15)
    for name, content in {"moe": QWEN3_30B, "dense": QWEN3_8B}.items():
        folder = Path(name)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "model.safetensors").touch()
        (folder / "tokenizer.json").write_text("{}")
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    for name, text in CONFIGS.items():
        Path(f"{name}.toml").write_text(text)


def _load(name: str, settings: Settings) -> Config:
    """By way of the command line's words."""
    return load_config([Path(f"{name}.toml")], shlex.split(as_overrides(settings))[1::2])


def _job(config: Config, num_gpus: int, **machine: Any) -> Job:
    return Job.of(config, model_facts(config, num_gpus), Machine(num_gpus, 80 * GB, **machine))


@pytest.mark.parametrize("settings", CHANGES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_plan_refuses_what_train_refuses_in_the_same_words(name: str, settings: Settings) -> None:
    config = _load(name, settings)
    for num_gpus in NUMBERS:
        assert _job(config, num_gpus).problems == check(config, num_gpus, needs=AT_ONCE)


def test_the_grid_has_runs_of_both_kinds() -> None:
    found = [
        bool(check(_load(name, each), n, needs=AT_ONCE))
        for name in CONFIGS
        for each in CHANGES
        for n in (8, 16)
    ]
    assert 0.2 < sum(found) / len(found) < 0.8


@pytest.mark.parametrize(
    ("name", "settings", "num_gpus"),
    [
        ("experts", {}, 16),
        ("experts", {}, 24),
        ("experts", {"parallel.expert_tensor": 4, "parallel.tensor": 4, "optimizer.offload": True}, 16),
        ("experts", {"megatron.recompute_granularity": "selective"}, 32),
        ("experts", {"lora.rank": 8, "model.layer_spec": "torch", "rollout.prompts_per_rollout": 24}, 16),
        ("dense", {}, 8),
        ("dense", {"parallel.tensor": 8}, 12),
    ],
    ids=str,
)
def test_train_admits_each_proposal_as_it_is_written(name: str, settings: Settings, num_gpus: int) -> None:
    """The fastest comes first, and no two differ in their virtual pipeline alone."""
    job = _job(_load(name, settings), num_gpus, host_bytes=1500 * GB)
    found = propose(job)
    proposals = found.proposals
    assert proposals and found.num_admitted <= len(list(divisible_layouts(job)))
    seconds = [proposal.time.total for proposal in proposals]
    assert seconds == sorted(seconds)
    plain = {replace(proposal.layout, virtual_pipeline=1) for proposal in proposals}
    assert len(plain) == len(proposals)
    for proposal in proposals:
        config = _load(name, {**settings, **proposal.settings})
        assert check(config, num_gpus, needs=AT_ONCE) == []
        again = _job(config, num_gpus, host_bytes=1500 * GB)
        memory = memory_of(again, again.layout)
        assert memory == proposal.memory and step_time(again, again.layout) == proposal.time
        assert memory.peak <= (1 - HEADROOM) * 80 * GB
        assert memory.host.per_node <= 1500 * GB


@pytest.mark.parametrize(
    ("name", "settings", "num_gpus", "gpu_bytes"),
    [
        ("experts", {}, 4, 80 * GB),
        ("dense", {}, 4, 24 * GB),
        ("dense", {"parallel.max_tokens_per_microbatch": 131072}, 16, 30 * GB),
        ("dense", {"algorithm.loss_from": "logits", "optimizer.distributed": False}, 32, 60 * GB),
    ],
    ids=str,
)
def test_train_admits_layouts_for_a_run_that_does_not_fit(
    name: str, settings: Settings, num_gpus: int, gpu_bytes: int
) -> None:
    plan = make_plan(_load(name, settings), Machine(num_gpus, gpu_bytes))
    assert not plan.fits and plan.found is not None
    shown = [(num_gpus, proposal.settings) for proposal in plan.found.proposals[:3]]
    if plan.fewest is not None and plan.fewest.proposal is not None:
        shown.append((plan.fewest.num_gpus, plan.fewest.proposal.settings))
    assert shown
    for enough, changes in shown:
        followed = _load(name, {**settings, **changes})
        assert check(followed, enough, needs=AT_ONCE) == []
        assert make_plan(followed, Machine(enough, gpu_bytes)).fits
