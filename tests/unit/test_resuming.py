"""Which settings a resume may change: each one of the schema, and how a difference is shown."""

import itertools
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.checkpoints.checkpoint_folder import sums_of, write_sums
from megatron_dppo.cli import app
from megatron_dppo.config import dump_config
from megatron_dppo.config.load import flat
from megatron_dppo.config.markers import ALL_SETS, TIME_LIMIT, TRAINING, Section
from megatron_dppo.config.resuming import (
    EFFECTS,
    OPTION_MAY_CHANGE,
    SettingChange,
    effect_on_evaluation,
    effects_of,
    experiment_changes,
    free_settings,
    may_change,
    setting_changes,
)
from megatron_dppo.config.schema import Config
from megatron_dppo.evaluate import _describe_sets

ROOT = Path(__file__).parents[2]
DEFAULTS = Config().model_dump(mode="json")
KEYS = sorted(flat(DEFAULTS))
SCORED = {key for key in EFFECTS if effect_on_evaluation(key) != "no"}


def nested(key: str, value: Any) -> dict[str, Any]:
    *tables, name = key.split(".")
    found: dict[str, Any] = {name: value}
    for table in reversed(tables):
        found = {table: found}
    return found


class Sampling(Section):
    """A section of settings that nobody marked, but for one."""

    width: int = 1
    depth: Annotated[int, TIME_LIMIT] = 1


class Outer(Section):
    """A config with an unmarked section, and with one that has a marker."""

    first: Sampling = Sampling()
    second: Annotated[Sampling, TRAINING] = Sampling()


def test_setting_without_a_marker_inherits_its_sections_marker() -> None:
    found = dict(effects_of(Outer, "", ALL_SETS))
    assert found == {
        "first.width": ALL_SETS,
        "first.depth": TIME_LIMIT,
        "second.width": TRAINING,
        "second.depth": TIME_LIMIT,
    }


def test_every_setting_has_an_effect() -> None:
    assert set(EFFECTS) == {*KEYS, "evaluation.sets", "tracking.shadow_options"}
    assert not may_change("run.seed") and effect_on_evaluation("run.seed") == "all sets"


@pytest.mark.parametrize("key", KEYS)
def test_a_resume_is_refused_by_the_class_of_the_setting(key: str) -> None:
    (change,) = setting_changes({}, nested(key, "another value"))
    assert change.setting == key and change.now == "another value"
    assert bool(experiment_changes({}, nested(key, "another value"))) != may_change(key)


@pytest.mark.parametrize(
    ("key", "is_free"),
    [
        ("data.reward.math", False),
        ("algorithm.rule_options.max_ratio", False),
        ("evaluation.sets.near.prompts", False),
        ("tracking.shadow_options.grpo.eps_high", True),
        ("sglang.speculative_draft_window_size", False),
        ("sglang.max_lora_rank", False),
        ("sglang.dtype", False),
        ("sglang.tp_size", True),
        ("megatron.moe_aux_loss_coeff", False),
        ("megatron.recompute_method", True),
    ],
)
def test_an_entry_of_a_table_has_a_class(key: str, is_free: bool) -> None:
    assert bool(experiment_changes({}, nested(key, 3))) != is_free


def test_free_options_are_arguments_of_sglang() -> None:
    """A misspelt or invented name would silently be refused on a resume."""
    package = ROOT / "megatron_dppo/engines/sglang"
    known = {name for file in package.glob("arguments_*.json") for name in json.loads(file.read_text())}
    own = {key.partition(".")[2] for key in OPTION_MAY_CHANGE if key.startswith("sglang.")}
    assert own - known == {"python"}


def test_the_guide_lists_what_may_change() -> None:
    rows = [f"| {why} | {', '.join(f'`{key}`' for key in keys)} |" for why, keys in free_settings().items()]
    assert "\n".join(rows) in (ROOT / "examples/guides/stopping_and_resuming.md").read_text()


@pytest.mark.parametrize(("schedule", "is_free"), [("constant", True), ("linear", False), ("cosine", False)])
def test_a_run_may_become_longer_where_its_learning_rates_stay(schedule: str, is_free: bool) -> None:
    was = {"run": {"num_rollouts": 100}, "optimizer": {"schedule": schedule}}
    now = {"run": {"num_rollouts": 200}, "optimizer": {"schedule": schedule}}
    expected = [] if is_free else [SettingChange("run.num_rollouts", "100", "200")]
    assert experiment_changes(was, now) == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_that_samples_ahead_keeps_its_length(lag: int) -> None:
    """At its end it stops sampling: a longer run would have continued."""
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
    assert experiment_changes({"parallel": {"share_prefixes": False}}, {}) == []  # its default once
    assert setting_changes({"rollout": {"top_k": -1, "repetition_penalty": 1.0}}, {}) == []  # gone since
    assert experiment_changes({"rollout": {"keep_partials": False}}, {}) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_of_the_models_type_is_the_same_by_either_name(dtype: str) -> None:
    was = {"model": {"dtype": dtype}, "rollout": {"transformers": {"weights": dtype}}}
    other = {"model": {"dtype": dtype}, "rollout": {"transformers": {"weights": "bfloat16_fp8"}}}
    now = {"model": {"dtype": dtype}}
    assert experiment_changes(was, now) == experiment_changes(now, was) == []
    assert experiment_changes(other, now) == [
        SettingChange("rollout.transformers.weights", "bfloat16_fp8", dtype)
    ]


_SET = {"evaluation": {"sets": {"held_out": {"prompts": "held.jsonl"}}}}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({}, {"algorithm": {"delta": 0.15}}),
        ({}, {"algorithm": {"delta_low": 0.15, "delta_high": 0.15, "anchor": "rollout"}}),
        ({"algorithm": {"delta_low": 0.3, "delta_high": 0.3}}, {"algorithm": {"delta": 0.3}}),
        (
            {"algorithm": {"preset": "grpo"}},
            {"algorithm": {"preset": "grpo", "eps_low": 0.2, "ref_kl_coef": 0.0}},
        ),
        ({"algorithm": {"preset": "cispo"}}, {"algorithm": {"preset": "cispo", "ratio_cap": 5}}),
        (
            {"algorithm": {"preset": "dppo_topk_kl"}},
            {"algorithm": {"preset": "dppo_topk_kl", "top_k": 20, "include_other": True}},
        ),
        ({"model": {"load": "models/a"}}, {"model": {"load": "models/a", "reference": "models/a"}}),
        ({"model": {"load": "models/a"}}, {"model": {"load": str(Path("models/a").absolute())}}),
        ({"data": {"prompts": "a.jsonl"}}, {"data": {"prompts": "b/../a.jsonl"}}),
        ({}, {"rollout": {"max_turn_tokens": 1024}}),
        ({}, {"evaluation": {"max_response_tokens": 1024}}),
        (_SET, {"evaluation": {"sets": {"held_out": {"prompts": "held.jsonl", "temperature": 0.7}}}}),
        (
            {**_SET, "data": {"reward": "mine:score"}},
            {
                "data": {"reward": "mine:score"},
                "evaluation": {"sets": {"held_out": {"prompts": "held.jsonl", "reward": "mine:score"}}},
            },
        ),
        (_SET, {"evaluation": {"sets": {"held_out": {"prompts": "held.jsonl", "max_response_tokens": 1024}}}}),
    ],
)
def test_a_default_that_is_written_out_changes_nothing(was: dict[str, Any], now: dict[str, Any]) -> None:
    assert setting_changes(was, now) == setting_changes(now, was) == []


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        ({}, {"algorithm": {"delta": 0.2}}, [("algorithm.delta", "0.15", "0.2")]),
        ({}, {"algorithm": {"delta_low": 0.2}}, [("algorithm.delta_low", "0.15", "0.2")]),
        ({}, {"algorithm": {"preset": "grpo"}}, [("algorithm.preset", "dppo_binary_tv", "grpo")]),
        ({}, {"algorithm": {"alpha": 0.2}}, [("algorithm.alpha", "not set", "0.2")]),  # `check` refuses it
        ({}, {"model": {"reference": "other"}}, [("model.reference", "model", "other")]),
        ({"model": {"reference": "model"}}, {"model": {"load": "b"}}, [
            ("model.load", "model", "b"), ("model.reference", "model", "b")
        ]),
        ({}, {"rollout": {"max_turn_tokens": 10}}, [("rollout.max_turn_tokens", "1024", "10")]),
        ({}, {"evaluation": {"sets": {"new": {"prompts": "new.jsonl", "top_p": 1.0}}}}, [
            ("evaluation.sets.new.prompts", "not set", "new.jsonl"),
            ("evaluation.sets.new.top_p", "not set", "1.0"),
        ]),
    ],
)  # fmt: skip
def test_a_change_is_shown_with_the_values_that_count(
    was: dict[str, Any], now: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    assert experiment_changes(was, now) == [SettingChange(*change) for change in expected]


def test_a_rule_of_the_users_is_compared_by_its_settings_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rule_of_a_user.py").write_text("raise AssertionError('it was loaded')")
    monkeypatch.syspath_prepend(str(tmp_path))
    was = {"algorithm": {"preset": "rule_of_a_user:rule", "delta_low": 0.1, "delta_high": 0.2}}
    now = {"algorithm": {"preset": "rule_of_a_user:rule", "delta_low": 0.1, "delta_high": 0.3}}
    assert [change.setting for change in setting_changes(was, now)] == ["algorithm.delta_high"]


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
    write_sums(checkpoint, sums_of([checkpoint / "state.json"], checkpoint))


@pytest.mark.parametrize(
    ("given", "table"),
    [
        (["--set", "optimizer.lr=2e-6"], "optimizer.lr  1e-06  2e-06"),
        (["--set", "algorithm.preset=grpo"], "algorithm.preset  dppo_binary_tv  grpo"),
        (["--set", "run.num_rollouts=1", "--set", "tracking.alarms=off"], None),
        (["--set", "algorithm.delta=0.15", "--set", "model.reference=model"], None),
        (["--set", "algorithm.delta=0.25"], "algorithm.delta  0.15  0.25"),
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


def test_accepted_changes_need_the_flag_once(tmp_path: Path) -> None:
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


OTHER_VALUES: dict[str, Any] = {
    "model.dtype": "float32",
    "data.reward": "arithmetic",
    "data.thinking": "require",
    "data.prompt_column": "question",
    "data.answer_column": "reference",
    "rollout.engine": "sglang",
    "rollout.environment": "sudoku",
    "rollout.generate": "a.b:c",
    "rollout.agent.harness": "a.b:c",
    "rollout.agent.command": ("agent",),
    "rollout.agent.train": "all",
    "rollout.agent.thinking": "template",
    "rollout.thinking": "template",
    "rollout.agent.renderer": "glm-4.5",
    "rollout.transformers.weights": "float32",
    "evaluation.pass_at": [3],
}


def other_value(key: str, default: Any) -> Any:
    """Return a valid value of a setting that is not its default."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    return default / 2 if isinstance(default, float) else (default or 0) + 1


@pytest.mark.parametrize("key", sorted(SCORED - {"evaluation.sets", "model.load"}))
def test_kept_results_of_an_evaluation_depend_on_a_setting_by_its_class(tmp_path: Path, key: str) -> None:
    (tmp_path / "near.jsonl").write_text("{}\n")
    (tmp_path / "config.json").write_text("{}")
    engine = {"rollout": {"engine": "sglang"}} if key.startswith("rollout.sglang.") else {}
    tables = {
        "model": {"load": tmp_path},
        "data": {"reward": "math"},
        "evaluation": {"sets": {"near": {"prompts": tmp_path / "near.jsonl"}}},
    }
    base = Config.model_validate(tables | engine)
    section, _, name = key.rpartition(".")
    default = flat(base.model_dump(mode="json"))[key]
    changed = base.model_dump()
    table = changed
    for part in section.split("."):
        table = table[part]
    table[name] = other_value(key, default)
    before = _describe_sets(base, "weights", 0)["near"]["of"]
    assert _describe_sets(base, "weights", 0)["near"]["of"] == before
    assert _describe_sets(Config.model_validate(changed), "weights", 0)["near"]["of"] != before


def test_kept_results_of_an_evaluation_depend_on_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat template makes the prompts. Files of the reward are compared with what its workers have read."""
    monkeypatch.chdir(tmp_path)
    model, prompts = tmp_path / "model", tmp_path / "near.jsonl"
    model.mkdir()
    files = [model / "config.json", model / "chat_template.jinja", prompts]
    for file in files:
        file.write_text("1")
    config = Config.model_validate(
        {
            "model": {"load": model},
            "evaluation": {"sets": {"near": {"prompts": prompts, "reward": "own.scores:score"}}},
        }
    )
    seen = [_describe_sets(config, "weights", 0)]
    for file in files:
        file.write_text("2")
        seen.append(_describe_sets(config, "weights", 0))
    assert all(before != after for before, after in itertools.pairwise(seen))
    (model / "metrics.json").write_text("an evaluation that wrote into the model's folder")
    assert _describe_sets(config, "weights", 0) == seen[-1]
    assert _describe_sets(config, "other weights", 0) != seen[-1] != _describe_sets(config, "weights", 1)
