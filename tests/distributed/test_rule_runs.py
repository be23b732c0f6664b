"""The loop trains with each preset that has no experiment in examples/, and with custom rules.

The presets of the experiments are trained by tests/recipes.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.algorithms import PRESETS, preset
from megatron_dppo.algorithms.presets import PAPER
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sanity_run import make_task, settings

EXPERIMENTS = [script.parent for script in Path(__file__).parents[2].glob("examples/*/train.sbatch")]
OF_RECIPES = {
    tomllib.loads(file.read_text()).get("algorithm", {}).get("preset")
    for experiment in EXPERIMENTS
    for file in experiment.glob("*.toml")
}
# As published, mis and trm would drop every response of so small a model.
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"top_k": 8} if PRESETS[name].needs_topk else {} for name in PRESETS if name not in OF_RECIPES},
    "mis": {"rho_low": 0.5, "rho_high": 2.0},
    "trm": {"top_k": 8, "token_kl": 8.0, "response_kl": 4.0},
    "tests.support.own_rules:halves": {},
    "tests.support.own_rules:measured": {},
    "tests.support.own_rules:averages": {"rule_over": "responses"},
    "tests.support.own_rules:divergence_mask": {"rule_options": {"delta": 0.01}, "anchor": "recomputed"},
}


def train_with_each(runtime: Runtime, task: Path) -> None:
    """Two rollouts of two gradient steps each, with one preset after another."""
    import megatron_dppo.train as loop
    from megatron_dppo.config.schema import Config
    from megatron_dppo.run.logger import RunLogger
    from megatron_dppo.run.preemption import StopRequests
    from megatron_dppo.run.session import RunSession

    for name, options in ALGORITHMS.items():
        changes: dict[str, dict[str, Any]] = {
            "run": {"folder": str(task / name), "num_rollouts": 2},
            "data": {"reward": "tests.faults.rewards:digits"},
            "optimizer": {"warmup_steps": 0, "lr": 1e-3},
        }
        tables = settings(task, name, **changes)
        tables["algorithm"] = {"minibatches_per_rollout": 2, "preset": name, **options}
        config = Config.model_validate(tables)
        with StopRequests().handle_signals() as requests, RunLogger.open(config, runtime) as logger:
            loop.Training.prepare(config, RunSession(runtime, logger, requests)).run()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, by preset."""
    task = make_task(tmp_path_factory.mktemp("task"))
    run_ranks(train_with_each, 1, task, task)
    return task


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_loop_trains_with_each_rule(trained: Path, name: str) -> None:
    rows = metrics_of(trained / name)
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == 4
    assert any(step["optimizer/grad_norm"] for step in steps)  # of one a rule may drop every token
    for step in steps:
        assert math.isfinite(step["loss/policy"]) and 0 <= step["optimizer/grad_norm"] < math.inf
        assert step["optimizer/skipped_steps"] == 0
        shares = [step[f"trust_region/masked_fraction_{sign}"] for sign in ("positive", "negative")]
        assert all(0 <= share <= 1 for share in shares)
        values = {metric for metric in step if metric.startswith("rule/")}
        assert values == ({"rule/gap", "rule/is_away"} if name.endswith(":measured") else set())
        has_weights = {"trust_region/weight_positive", "trust_region/weight_negative"} <= step.keys()
        assert has_weights == preset(name).is_soft
        shadows = {metric.split("/")[1] for metric in step if metric.startswith("shadow/")}
        assert shadows and shadows <= set(PAPER), "only tracking.shadow_presets adds others"
