"""Which settings a resume may change: each one of the schema, and how a difference is shown."""

import json
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.config import dump_config
from megatron_dppo.config.resuming import MAY_CHANGE, SettingChange, experiment_changes, setting_changes
from megatron_dppo.config.schema import Config
from megatron_dppo.config.settings import flat

ROOT = Path(__file__).parents[2]
DEFAULTS = Config().model_dump(mode="json")
KEYS = sorted(flat(DEFAULTS))
PART_OF_THE_EXPERIMENT = (
    *("run.seed", "model.", "lora.", "optimizer.lr", "optimizer.schedule", "optimizer.beta1", "rollout.engine"),
    *(
        "data.prompts",
        "data.reward_values",
        "data.overlong",
        "data.max_prompt_tokens",
        "rollout.temperature",
        "rollout.top_p",
    ),
    *("rollout.routing_replay", "rollout.transformers.weights", "algorithm.preset", "algorithm.delta"),
    *("algorithm.logits_dtype", "evaluation.temperature"),
)


def nested(key: str, value: Any) -> dict[str, Any]:
    *tables, name = key.split(".")
    found: dict[str, Any] = {name: value}
    for table in reversed(tables):
        found = {table: found}
    return found


@pytest.mark.parametrize("key", KEYS)
def test_a_setting_is_free_or_part_of_the_experiment(key: str) -> None:
    """Whatever is not listed is refused, so a new field of the schema is safe by default."""
    (change,) = setting_changes({}, nested(key, "another value"))
    assert change.setting == key and change.now == "another value"
    is_free = any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
    assert bool(experiment_changes({}, nested(key, "another value"))) == (not is_free)
    assert not (is_free and key.startswith(PART_OF_THE_EXPERIMENT))


def test_every_pattern_names_a_setting() -> None:
    """Those of pass-through tables aside."""
    own = [pattern for pattern in MAY_CHANGE if not pattern.startswith(("megatron.", "sglang."))]
    assert all(any(fnmatchcase(key, pattern) for key in KEYS) for pattern in own)


def test_the_readme_lists_what_may_change() -> None:
    rows = [f"| `{setting}` | {why} |" for setting, why in MAY_CHANGE.items()]
    assert "\n".join(rows) in (ROOT / "megatron_dppo/config/README.md").read_text()


@pytest.mark.parametrize(("schedule", "is_free"), [("constant", True), ("linear", False), ("cosine", False)])
def test_a_run_may_become_longer_where_its_learning_rates_stay(schedule: str, is_free: bool) -> None:
    was = {"run": {"num_rollouts": 100}, "optimizer": {"schedule": schedule}}
    now = {"run": {"num_rollouts": 200}, "optimizer": {"schedule": schedule}}
    expected = [] if is_free else [SettingChange("run.num_rollouts", "100", "200")]
    assert experiment_changes(was, now) == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_samples_ahead_keeps_its_length(lag: int) -> None:
    """At its end it stops sampling: a longer run would have gone on."""
    was, now = ({"run": {"num_rollouts": n}, "rollout": {"lag": lag}} for n in (10, 20))
    expected = [SettingChange("run.num_rollouts", "10", "20")] if lag else []
    assert experiment_changes(was, now) == expected


def test_settings_are_compared_by_value_and_shown_as_text() -> None:
    """What an older config lacks had its default; a reward may be a name or a table."""
    assert setting_changes({}, DEFAULTS) == []
    assert experiment_changes({"data": {"reward": {"math": 1.0}}}, {"data": {"reward": "math"}}) == [
        SettingChange("data.reward", "not set", "math"),
        SettingChange("data.reward.math", "1.0", "not set"),
    ]
    assert setting_changes({"megatron": {"recompute_method": "block"}}, {}) == [
        SettingChange("megatron.recompute_method", "block", "not set")
    ]
    assert experiment_changes({"megatron": {"recompute_method": "block"}}, {}) == []


def test_a_resolved_config_names_its_reward() -> None:
    """A run from before `data.reward` was required resumes with a config that names what it had."""
    was = tomllib.loads(dump_config(Config.model_validate({"data": {"reward": "arithmetic"}})))
    assert experiment_changes(was, {"data": {"reward": "arithmetic"}}) == []
    assert experiment_changes(was, {}) == [SettingChange("data.reward", "arithmetic", "")]


def saved(run: Path, config: str) -> None:
    """A checkpoint's state.json, as a run writes it."""
    checkpoint = run / "checkpoints" / "step_00000008"
    checkpoint.mkdir(parents=True)
    content = {"state": {"rollout": 2}, "prompts_digest": "", "config": config, "open_rollout": None}
    (checkpoint / "state.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("given", "table"),
    [
        (["--set", "optimizer.lr=2e-6"], "optimizer.lr  1e-06  2e-06"),
        (["--set", "algorithm.preset=grpo"], "algorithm.preset  dppo_binary_tv  grpo"),
        (["--set", "run.num_rollouts=1", "--set", "tracking.alarms=off"], None),
        (["--set", "optimizer.lr=2e-6", "--accept-changes"], None),
        (["--set", "optimizer.lr=2e-6", "--set", "checkpoint.resume=false"], None),
    ],
)
def test_check_shows_what_another_experiment_would_change(
    tmp_path: Path, given: list[str], table: str | None
) -> None:
    run = tmp_path / "run"
    config = Config.model_validate({"run": {"folder": run}})
    saved(run, dump_config(config))
    toml = tmp_path / "base.toml"
    toml.write_text(f"run.folder = '{run}'\n")
    said = CliRunner().invoke(app, ["check", str(toml), *given]).stderr
    assert ("--accept-changes" in said) == (table is not None)
    if table is not None:
        assert table in " ".join(said.split()).replace(" ", "  ") and "setting" in said
        assert "step_00000008" in said


def test_what_the_last_start_accepted_needs_no_second_flag(tmp_path: Path) -> None:
    """A job that dies before its next checkpoint is started again with the same settings."""
    run = tmp_path / "run"
    saved(run, dump_config(Config.model_validate({"run": {"folder": run}})))
    changed = Config.model_validate({"run": {"folder": run}, "optimizer": {"lr": 2e-6}})
    (run / "config.toml").write_text(dump_config(changed))
    toml = tmp_path / "base.toml"
    toml.write_text(f"run.folder = '{run}'\noptimizer.lr = 2e-6\n")
    assert "--accept-changes" not in CliRunner().invoke(app, ["check", str(toml)]).stderr
    third = CliRunner().invoke(app, ["check", str(toml), "--set", "optimizer.lr=3e-6"]).stderr
    assert "--accept-changes" in third and "1e-06" in third, "what trained the checkpoint is shown"
