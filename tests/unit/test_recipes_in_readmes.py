"""Each recipe for adding something works as it is written: its code blocks are read and followed."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.actor.observation import Observer
from megatron_dppo.algorithms import preset
from megatron_dppo.config import Config
from megatron_dppo.config.sections import TrackingConfig
from megatron_dppo.kernels import fused_policy_loss
from megatron_dppo.metrics import means
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.rewards import RewardRequest, RewardResult
from megatron_dppo.rollout.counts import DROP_REASONS, RolloutCounts
from megatron_dppo.rollout.scoring import RewardPools, training_reward
from megatron_dppo.run.logger import RunLogger
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.process import start, stop
from megatron_dppo.types import Prompt
from tests.support.loss_batches import make_batch
from tests.support.samples import make_group, make_sample

ROOT = Path(__file__).parents[2]
REWARDS, TRUST_REGIONS = "docs/reference/rewards.md", "docs/reference/trust_regions.md"
PAGES = {
    "a reward": "megatron_dppo/rewards/README.md",
    "a divergence": TRUST_REGIONS,
    "a loss term": TRUST_REGIONS,
    "a metric": "megatron_dppo/metrics/README.md",
    "a family": "megatron_dppo/architectures/README.md",
}


def blocks(page: str, heading: str) -> list[str]:
    """The code blocks of a section of a page, in their order."""
    text = (ROOT / page).read_text()
    _, _, section = text.partition(f"\n## {heading}\n")
    return re.findall(r"```\w+\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)


def test_the_front_page_names_where_to_add_things() -> None:
    readme = (ROOT / "README.md").read_text()
    for what, page in PAGES.items():
        (link,) = re.findall(rf"^\| {what} \|.*\(({re.escape(page)}[^)]*)\) \|$", readme, re.MULTILINE)
        file, _, anchor = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
        assert anchor in {"", *(each.lower().replace(" ", "-") for each in headings)}


def test_the_reward_scores_a_row_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, toml = blocks(PAGES["a reward"], "Adding a reward")
    of_groups, toml_of_groups = blocks(REWARDS, "Rewards of groups")
    Path(tmp_path, "my_rewards.py").write_text(module)
    Path(tmp_path, "judge.py").write_text(of_groups)
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate(tomllib.loads(toml))
    prompt = Prompt("0", "4", "test", text="2 + 2 =")
    with closing(RewardPools(config.data, [training_reward(config)])) as pools:
        pools.start({training_reward(config): prompt})
        asked = [RewardRequest(prompt, " 4 ", "stop"), RewardRequest(prompt, "it is 5", "stop")]
        asked.append(RewardRequest(prompt, "4", "length"))
        scorer = pools.of(training_reward(config))
        scored = [asyncio.run(scorer.score_one(request)) for request in asked]
    assert scored == [
        RewardResult(1.0, {"num_words": 1.0}),
        RewardResult(0.0, {"num_words": 3.0}),
        RewardResult(0.0, {"num_words": 1.0}),
    ]
    name = training_reward(Config.model_validate(tomllib.loads(toml_of_groups)))
    with closing(RewardPools(config.data, [name])) as pools:
        pools.start({name: prompt})
        found = asyncio.run(pools.of(name).score_group(asked))
    assert found == [RewardResult(2 / 4), RewardResult(2 / 8), RewardResult(1.0)]


USE = """
from tests.support.loss_batches import make_batch
import torch
from megatron_dppo.algorithms import PRESETS, PolicyLossInputs, TopKLogProbs, policy_loss, preset
from megatron_dppo.kernels import fused_policy_loss

for name in ("dppo_binary_hellinger", "dppo_topk_hellinger"):
    objective, batch = preset(name, delta=1e-3), make_batch(torch.float64, top_k=20)
    m = batch.microbatch
    logits = batch.logits.clone().requires_grad_()
    out = fused_policy_loss(logits, **batch.arguments, objective=objective)
    out.loss_sum.backward()
    is_masked = m.loss_mask & ~out.mask
    assert is_masked.any() and (m.loss_mask & out.mask).any()
    assert (out.divergence[is_masked] > objective.delta).all() and (out.coefficient[is_masked] == 0).all()
    assert (logits.grad[is_masked] == 0).all() and (logits.grad[m.loss_mask & out.mask] != 0).any()
    topk = TopKLogProbs(m.topk.ids, m.topk.log_probs, out.topk_log_probs) if objective.needs_topk else None
    inputs = PolicyLossInputs(
        out.log_probs, m.rollout_log_probs, m.advantages, m.loss_mask, topk=topk, targets=m.targets
    )
    assert torch.equal(policy_loss(objective, inputs).mask, out.mask)
"""


def test_the_divergence_masks_tokens_on_a_cpu(tmp_path: Path) -> None:
    """Binary and Top-K, in a copy of the package: by the loss, and the tests of every preset's properties."""
    functions, lines = blocks(TRUST_REGIONS, "Adding a divergence")
    entries, presets = lines.split("\n\n")
    package = _copy_of_package(tmp_path)
    _insert(package / "algorithms" / "divergence.py", "DIVERGENCES: Mapping", functions, is_after=False)
    _insert(package / "algorithms" / "divergence.py", '    "DIVERGENCES",\n    {\n', entries)
    rules = package / "algorithms" / "paper_rules.py"
    rules.write_text(rules.read_text() + presets)
    properties = ROOT / "tests" / "unit" / "test_algorithms_properties.py"
    Path(tmp_path, "pytest.ini").write_text("[pytest]\n")
    tests = ["-m", "pytest", "-q", "-c", str(tmp_path / "pytest.ini"), "-p", "no:cacheprovider"]
    _run(tmp_path, ["-c", USE])
    _run(tmp_path, [*tests, "--import-mode=importlib", str(properties), "-k", "hellinger"])


USE_TERM = """
from dataclasses import replace
from tests.support.loss_batches import make_batch
import torch
from megatron_dppo.actor.observation import Observer
from megatron_dppo.algorithms import preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.config import Config
from megatron_dppo.config.sections import TrackingConfig
from megatron_dppo.kernels import fused_policy_loss
from megatron_dppo.metrics.metrics import Metrics

settings = Config.model_validate({"algorithm": {"preset": "grpo", "prob_gap_coef": 0.1}}).algorithm
objective, batch = preset(settings.preset, **overrides_in(settings.model_dump())), make_batch(torch.float64)
m, learns = batch.microbatch, batch.microbatch.loss_mask
logits, others = (batch.logits.clone().requires_grad_() for _ in range(2))
out = fused_policy_loss(logits, **batch.arguments, objective=objective)
out.loss_sum.backward()
without = replace(objective, prob_gap_coef=0.0)
columns = others[:, :batch.vocab_size] / batch.temperature
pi = columns.log_softmax(1).gather(1, m.targets[:, None])[:, 0].exp()[learns]
gaps = (pi - m.rollout_log_probs[learns].exp()).square()
expected = fused_policy_loss(others, **batch.arguments, objective=without).loss_sum
expected = expected + 0.1 * (m.token_weights[learns] * gaps).sum()
expected.backward()
torch.testing.assert_close(out.loss_sum, expected, rtol=1e-12, atol=0)
torch.testing.assert_close(logits.grad, others.grad, rtol=1e-9, atol=1e-12)
metrics = Metrics()
Observer(objective, TrackingConfig(shadow=False), num_topk_log_probs=0).observe(metrics, out, m, is_first=False)
total, count = metrics.state()["means"]["policy/prob_gap"]
assert count == int(learns.sum()) and abs(total - float(gaps.sum())) < 1e-9
"""


def test_the_loss_term_trains_and_is_measured(tmp_path: Path) -> None:
    functions, lines = blocks(TRUST_REGIONS, "Adding a loss term")
    field, entry = lines.split("\n\n")
    terms = _copy_of_package(tmp_path) / "algorithms" / "loss_terms.py"
    _insert(terms, "LOSS_TERMS: Mapping", functions, is_after=False)
    _insert(terms, "    ratio_cap: float = number(", field, is_after=False)
    _insert(terms, "LOSS_TERMS: Mapping[str, LossTerm] = MappingProxyType(\n    {\n", entry + "\n")
    _run(tmp_path, ["-c", USE_TERM])


def _copy_of_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    return shutil.copytree(ROOT / "megatron_dppo", folder / "megatron_dppo", ignore=ignored)


def _run(folder: Path, command: list[str]) -> None:
    """Run Python with the copy of the package in a folder."""
    paths = [str(folder), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _insert(file: Path, mark: str, text: str, *, is_after: bool = True) -> None:
    before, found, after = file.read_text().partition(mark)
    assert found
    file.write_text(before + (mark + text if is_after else text + "\n\n" + mark) + after)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of `means.py` after its recipe was followed, until the test is over."""
    monkeypatch.setattr(means, "_token_means", dict(means.TOKEN_MEANS))
    monkeypatch.setattr(means, "_group_means", dict(means.GROUP_MEANS))
    names = dict(vars(means))
    exec(blocks(PAGES["a metric"], "Adding a metric")[0], names)
    return names


def test_metrics_are_in_metrics_jsonl(tmp_path: Path, recipe: dict[str, Any]) -> None:
    config = Config.model_validate({"run": {"folder": tmp_path / "run"}})
    batch = make_batch(torch.float32)
    m, objective = batch.microbatch, preset("dppo_binary_tv")
    out = fused_policy_loss(batch.logits, **batch.arguments, objective=objective)
    of_step = Metrics()
    observer = Observer(objective, TrackingConfig(shadow=False), num_topk_log_probs=0)
    observer.observe(of_step, out, m, is_first=False)
    groups = tuple(
        make_group(
            index, [make_sample([1, 2, 3, number], 2, reward=reward) for number, reward in enumerate(own)]
        )
        for index, own in enumerate([(0.0, 1.0), (0.25, 0.5)])
    )
    none: dict[str, Any] = {field.name: 0 for field in fields(RolloutCounts) if field.type is int}
    none |= {"num_prompts": 2, "num_samples": 4}
    counts = RolloutCounts(**none, num_dropped=dict.fromkeys(DROP_REASONS, 0))
    runtime = start(1, 60.0)
    try:
        with RunFolder.open(config.run.folder, config.model_dump(mode="json"), False) as folder:
            run_logger = RunLogger(config, runtime, folder)
            run_logger.add_values(run_logger.describe_rollout(groups, counts))
            run_logger.write_step(0, 0, of_step)
            run_logger.write_rollout(0, {"total": 1.0})
    finally:
        stop()
    step, rollout = map(json.loads, (config.run.folder / "metrics.jsonl").read_text().splitlines())
    assert step["policy/surprisal"] == pytest.approx(float(-out.log_probs[m.loss_mask].double().mean()))
    assert rollout["reward/best"] == 0.75 and rollout["reward/zero_variance_fraction"] == 0.0
