"""TOML layers, overrides, and what a user sees when they are wrong."""

import math
import tomllib
from pathlib import Path

import pytest

from megatron_dppo.config import Config, dump_config, load_config
from megatron_dppo.config.markers import idle_settings
from megatron_dppo.config.rollout import (
    CommandSource,
    EmbeddedRollout,
    EnvironmentSource,
    FixedLag,
    GenerateSource,
    HarnessSource,
    LargestAge,
    SglangRollout,
    SingleTurnSource,
    Source,
    Staleness,
    with_engine,
)
from megatron_dppo.errors import ConfigError, Problem


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def _problems(paths: list[Path], overrides: tuple[str, ...] = ()) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as raised:
        load_config(paths, overrides)
    return {problem.where: problem for problem in raised.value.problems}


def test_layers_merge_left_to_right_and_overrides_win(tmp_path: Path) -> None:
    base = _file(tmp_path, "base.toml", "[optimizer]\nlr = 1e-6\nbeta1 = 0.8\n[run]\nseed = 1\n")
    algorithm = _file(tmp_path, "algo.toml", "[optimizer]\nlr = 2e-6\n[megatron]\nmoe_z_loss_coeff = 0.1\n")
    config = load_config([base, algorithm], ["run.seed=7", "megatron.moe_permute_fusion=true"])
    assert (config.optimizer.lr, config.optimizer.beta1, config.run.seed) == (2e-6, 0.8, 7)
    assert config.megatron == {"moe_z_loss_coeff": 0.1, "moe_permute_fusion": True}


def test_no_files_give_the_defaults() -> None:
    assert load_config([]) == Config()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.folder=runs/a b", Path("runs/a b")),
        ("run.folder='runs/x'", Path("runs/x")),
        ("run.folder=a=b", Path("a=b")),
        (" run . folder = x ", Path("x")),
    ],
)
def test_override_values_are_toml_or_else_strings(override: str, value: Path) -> None:
    assert load_config([], [override]).run.folder == value


def test_overrides_take_lists_tables_and_infinity() -> None:
    overrides = [
        "tracking.backends=['wandb']",
        "rollout.transformers={batch_size = 3}",
        "algorithm.ratio_cap=inf",
    ]
    config = load_config([], overrides)
    assert config.tracking.backends == ("wandb",)
    assert config.rollout.transformers.batch_size == 3
    assert config.algorithm.model_dump()["ratio_cap"] == math.inf


BASE = """[data]
reward_values = [-1.0, 1.0]
shuffle = false
[sglang]
tp_size = 2
[evaluation]
temperature = 0.5
[evaluation.sets.a]
prompts = "a.jsonl"
[evaluation.sets.b]
prompts = "b.jsonl"
"""


@pytest.mark.parametrize("is_file", [False, True], ids=["override", "file"])
def test_a_later_layer_takes_settings_of_earlier_ones_away(tmp_path: Path, is_file: bool) -> None:
    names = ["data.reward_values", "evaluation.sets.a", "sglang.tp_size", "rollout.generate"]
    base = _file(tmp_path, "base.toml", BASE)
    if is_file:
        overlay = _file(tmp_path, "overlay.toml", f"unset = {names}\n[data]\nmax_prompt_tokens = 3\n")
        config = load_config([base, overlay])
    else:
        config = load_config([base], [*(f"{name}=none" for name in names), "data.max_prompt_tokens=3"])
    assert config.data.reward_values == Config().data.reward_values == (0.0, 1.0)
    assert not config.data.shuffle and config.data.max_prompt_tokens == 3
    assert list(config.evaluation.sets) == ["b"] and config.evaluation.temperature == 0.5
    assert config.sglang == {} and config.rollout.generate is None
    assert load_config([base], ["evaluation.sets=none"]).evaluation.sets == {}
    assert load_config([base], ["evaluation=none"]).evaluation == Config().evaluation


def test_setting_after_unset_counts_and_quoted_none_is_a_string(tmp_path: Path) -> None:
    base = _file(tmp_path, "base.toml", BASE)
    again = _file(
        tmp_path, "again.toml", "unset = ['data.reward_values']\n[data]\nreward_values = [0.0, 5.0]\n"
    )
    assert load_config([base, again]).data.reward_values == (0.0, 5.0)
    assert load_config([base], ["sglang.moe_a2a_backend='none'"]).sglang["moe_a2a_backend"] == "none"


def test_taking_away_what_is_no_setting_is_explained(tmp_path: Path) -> None:
    overlay = _file(tmp_path, "overlay.toml", "unset = ['data.reward_valuse', 'evaluation.sets.a.nothing']\n")
    problems = _problems([overlay], ("optimzer.lr=none",))
    assert problems["data.reward_valuse"].action == "Did you mean data.reward_values?"
    assert problems["data.reward_valuse"].found == f"none (set by {overlay})"
    assert set(problems) == {"data.reward_valuse", "evaluation.sets.a.nothing", "optimzer.lr"}
    (problem,) = _problems([_file(tmp_path, "overlay.toml", "unset = 'data.reward_values'\n")]).values()
    assert (problem.where, problem.expected) == ("unset", "a list of settings, as strings")


def test_dump_is_toml_that_loads_to_the_same_config(tmp_path: Path) -> None:
    overrides = ["algorithm.ratio_cap=inf", "evaluation.sets.a.prompts=a.jsonl", "tracking.backends=['wandb']"]
    config = load_config([], [*overrides, "megatron.recompute_modules=['moe']", "optimizer.lr=1.23456789e-07"])
    text = dump_config(config)
    assert load_config([_file(tmp_path, "config.toml", text)]) == config
    assert "delta" not in tomllib.loads(text)["algorithm"]


def test_a_misspelt_key_of_an_evaluation_set_is_explained(tmp_path: Path) -> None:
    file = _file(tmp_path, "config.toml", '[evaluation.sets.aime]\nprompts = "a.jsonl"\ntemprature = 1.0\n')
    (problem,) = _problems([file]).values()
    assert problem.where == "evaluation.sets.aime.temprature"
    assert problem.action == "Did you mean evaluation.sets.aime.temperature?"
    of_values = _problems([], ("evaluation.sets.aime.top_p=2.0",))
    assert set(of_values) == {"evaluation.sets.aime.top_p", "evaluation.sets.aime.prompts"}
    action = of_values["evaluation.sets.aime.prompts"].action
    assert action.startswith("Prompt file in the format of `data.prompts`")


def test_all_faults_are_reported_at_once_with_the_file_that_set_them(tmp_path: Path) -> None:
    base = _file(tmp_path, "base.toml", '[optimizer]\nlr = "fast"\nlrr = 2\n[rollout]\nlag = true\n')
    algorithm = _file(tmp_path, "algo.toml", "[optimzer]\nlr = 1\n[optimizer]\nbeta1 = 1.5\n")
    problems = _problems([base, algorithm, tmp_path / "none.toml"], ("run.seed=-1", "nonsense"))
    assert set(problems) == {
        *("optimizer.lr", "optimizer.lrr", "optimizer.beta1", "optimzer", "rollout.lag", "run.seed"),
        *(str(tmp_path / "none.toml"), "--set nonsense"),
    }
    assert problems["optimizer.lr"].found == f'"fast" (set by {base})'
    assert str(algorithm) in problems["optimizer.beta1"].found
    assert "--set run.seed=-1" in problems["run.seed"].found


@pytest.mark.parametrize(
    ("text", "where", "expected", "action"),
    [
        ("[optimizer]\nlrr = 1", "optimizer.lrr", "a key of [optimizer]", "Did you mean optimizer.lr?"),
        ("[optimzer]\nlr = 1", "optimzer", "a key of a config", "Did you mean optimizer?"),
        ("lr = 1", "lr", "a key of a config", "Did you mean optimizer.lr?"),
        ("[Optimizer]\nlr = 1", "Optimizer", "a key of a config", "Did you mean optimizer?"),
        ("[optimizer]\nLR = 1", "optimizer.LR", "a key of [optimizer]", "Did you mean optimizer.lr?"),
        ("[opt]\nlr = 1", "opt", "a key of a config", "Did you mean optimizer?"),
        ("[run]\nzzz = 1", "run.zzz", "folder", "Remove it"),
        ("[rollout]\ntop_k = 20", "rollout.top_k", "a truncated distribution", "Remove it."),
        ("[rollout]\nkeep_partials = false", "rollout.keep_partials", "drops them", "Remove it."),
        ("[rollout]\nrepetition_penalty = 1", "rollout.repetition_penalty", "penalised", "Remove it."),
        ("run = 3", "run", "a table", "Write a table [run]"),
        ("[rollout.transformers]\nweight = 1", "rollout.transformers.weight", "batch_size", "weights?"),
        ("[rollout]\nengine = 'sglan'", "rollout.engine", "'transformers' or 'sglang'", "Engine that samples"),
        ("[run]\nseed = '3'", "run.seed", "a whole number", "Seed of"),
        ("[run]\nnum_rollouts = 3.0", "run.num_rollouts", "a whole number", "Rollouts"),
        ("[run]\nnum_rollouts = true", "run.num_rollouts", "a whole number", "Rollouts"),
        ("[run]\nnum_rollouts = 0", "run.num_rollouts", "greater than 0", "Rollouts"),
        ("[rollout]\ntemperature = nan", "rollout.temperature", "a finite number", "Sampling"),
        ("[data]\nshuffle = 'yes'", "data.shuffle", "true or false", "Shuffle"),
        ("[model]\nload = 3", "model.load", "a string in quotes", "Hugging Face"),
        ("[tracking]\nbackends = ['tb']", "tracking.backends[0]", "'tensorboard'", "Trackers"),
        ("[tracking]\nbackends = 'wandb'", "tracking.backends", "a", "Trackers"),
        ("megatron = 1", "megatron", "a table", "megatron"),
        ("[run]\nseed = 4294967296", "run.seed", "less than 4294967296", "Seed of"),
        ("[run]\nseed = 98765432109876543210", "run.seed", "less than 4294967296", "Seed of"),
        ("[run]\nfolder = '~/runs'", "run.folder", "without ~ and $", "Run folder"),
        ("[model]\nload = '$MODELS/a'", "model.load", "without ~ and $", "Hugging Face"),
        ("[model]\nreference = 'a/${NAME}'", "model.reference", "without ~ and $", "reference"),
        ("[data]\nprompts = '~me/a.jsonl'", "data.prompts[0].path", "without ~ and $", "Path of"),
        ('[run]\nfolder = "a\\nb"', "run.folder", "control characters", "Run folder"),
        ('[model]\nload = "a/\\u0000"', "model.load", "control characters", "Hugging Face"),
        (f"[run]\nfolder = 'a/{'b' * 256}/c'", "run.folder", "at most 255 bytes", "Run folder"),
        (f"[run]\nfolder = '{'ä' * 128}'", "run.folder", "at most 255 bytes", "Run folder"),
    ],
)
def test_each_kind_of_fault(tmp_path: Path, text: str, where: str, expected: str, action: str) -> None:
    (problem,) = _problems([_file(tmp_path, "base.toml", text)]).values()
    assert problem.where == where
    assert expected in problem.expected
    assert action in problem.action


HARNESS, COMMAND = "rollout.agent.harness=m:f", 'rollout.agent.command=["sh","a"]'


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([], SingleTurnSource()),
        (["rollout.environment=sudoku"], EnvironmentSource("sudoku")),
        (["rollout.generate=m:f"], GenerateSource("m:f")),
        ([HARNESS], HarnessSource("m:f")),
        ([COMMAND], CommandSource(("sh", "a"))),
        (["rollout.agent.train=all"], SingleTurnSource()),
        ([HARNESS, "rollout.agent.harness=none", COMMAND], CommandSource(("sh", "a"))),
    ],
)
def test_one_value_names_the_source_of_responses(overrides: list[str], source: Source) -> None:
    for engine in ("transformers", "sglang"):
        assert load_config([], [*overrides, f"rollout.engine={engine}"]).rollout.source == source


@pytest.mark.parametrize(
    ("overrides", "staleness", "colocated"),
    [
        ([], FixedLag(0), False),
        (["rollout.lag=2", "rollout.release_trainer=true"], FixedLag(2), True),
        (["rollout.sglang.colocated=true"], FixedLag(0), False),
        (["rollout.engine=sglang", "rollout.sglang.colocated=true", "rollout.lag=1"], FixedLag(1), True),
        (["rollout.engine=sglang", "rollout.max_staleness=3"], LargestAge(3), False),
    ],
)
def test_the_engine_decides_what_its_settings_mean(
    overrides: list[str], staleness: Staleness, colocated: bool
) -> None:
    rollout = load_config([], overrides).rollout
    assert (rollout.staleness, rollout.colocated) == (staleness, colocated)
    assert (rollout.staleness.num_waiting, rollout.staleness.max_versions).count(0) >= 1


def test_settings_of_the_other_engine_are_checked_and_have_no_effect(tmp_path: Path) -> None:
    base = _file(
        tmp_path, "base.toml", "[rollout]\nover_sampling = 1.0\nmax_staleness = 0\nsglang.probe_every = 9\n"
    )
    config = load_config([base])
    assert isinstance(config.rollout, EmbeddedRollout)
    assert [key for key, _ in idle_settings(config)] == ["rollout.sglang.probe_every"]
    assert list(_problems([base], ("rollout.sglang.probe_every=-1",))) == ["rollout.sglang.probe_every"]
    served = load_config(
        [base], ["rollout.engine=sglang", "rollout.max_staleness=1", "rollout.over_sampling=2.0"]
    )
    assert isinstance(served.rollout, SglangRollout) and not list(idle_settings(served))
    assert load_config([_file(tmp_path, "dumped.toml", dump_config(served))]) == served


@pytest.mark.parametrize("value", ["sglan", "3", "[1]", "true"])
def test_an_unknown_engine_is_refused_at_its_key(value: str) -> None:
    (problem,) = _problems([], (f"rollout.engine={value}",)).values()
    assert (problem.where, problem.expected) == ("rollout.engine", "'transformers' or 'sglang'")


def test_another_engine_of_the_same_config_keeps_what_both_have() -> None:
    embedded = load_config(
        [], ["rollout.temperature=0.7", "rollout.release_trainer=true", "rollout.sglang.probe_every=9"]
    )
    served = with_engine(embedded.rollout, "sglang")
    assert isinstance(served, SglangRollout) and not served.release_trainer
    assert (served.temperature, served.sglang.probe_every) == (0.7, 9)
    assert with_engine(served, "sglang") is served


def test_infinity_turns_off_a_bound_of_a_shadow_and_no_other_setting() -> None:
    config = load_config([], ["tracking.shadow_options.grpo.eps_high=inf", "algorithm.ratio_cap=inf"])
    assert (
        config.tracking.shadow_options["grpo"]["eps_high"]
        == config.algorithm.model_dump()["ratio_cap"]
        == math.inf
    )
    assert list(_problems([], ("data.reward.math=inf",))) == ["data.reward"]
    assert list(_problems([], ("optimizer.lr=nan", "rollout.max_data_gib=inf"))) == [
        "rollout.max_data_gib",
        "optimizer.lr",
    ]


@pytest.mark.parametrize("path", ["runs/a~", "a$", "a $ b", "5$/c", "ä" * 127, "b" * 255, "two words"])
def test_a_path_that_is_odd_and_plain_is_taken(path: str) -> None:
    seed = (1 << 32) - 1
    config = load_config([], [f"run.folder={path!r}", f"run.seed={seed}"])
    assert config.run.folder == Path(path) and config.run.seed == seed


def test_torn_toml_names_its_line(tmp_path: Path) -> None:
    torn = _file(tmp_path, "torn.toml", "[run]\nseed = 1\n\nfolder = runs\n")
    (problem,) = _problems([torn]).values()
    assert problem.where == f"{torn}, line 4"
    assert "folder = runs" in problem.found


@pytest.mark.parametrize("text", ["[run", "[run]\nseed =", 'a = "', "[run]\n[run]\n"])
def test_toml_torn_anywhere_is_one_problem(tmp_path: Path, text: str) -> None:
    (problem,) = _problems([_file(tmp_path, "torn.toml", text)]).values()
    assert problem.expected == "valid TOML"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[run]\nfolder = '\xe9'\n")
    problems = _problems([tmp_path / "none.toml", tmp_path, latin])
    assert problems[str(tmp_path / "none.toml")].found == "no such file"
    assert problems[str(tmp_path)].expected == "a TOML file"
    assert "UTF-8" in problems[str(latin)].found


@pytest.mark.parametrize("override", ["run.seed", "=3", "run.=3", ".seed=3", "run..seed=3", ""])
def test_malformed_override(override: str) -> None:
    (problem,) = _problems([], (override,)).values()
    assert problem.where == f"--set {override}"


def test_a_value_cannot_smuggle_in_another_key() -> None:
    assert "run.seed" in _problems([], ("run.seed=1\nx=2",))


# A setting, what turns it on, and the keys that are named without it.
IDLE: list[tuple[str, str, list[str]]] = [
    ("data.overlong_penalty=3.0", "data.overlong_buffer_tokens=2", ["data.overlong_penalty"]),
    ("lora.alpha=16", "lora.rank=4", ["lora.alpha"]),
    ('lora.targets=["q_proj"]', "lora.rank=4", ["lora.targets"]),
    ("optimizer.min_lr=1e-7", 'optimizer.schedule="linear"', ["optimizer.min_lr"]),
    ("rollout.thinking=template", "rollout.environment=sudoku", ["rollout.thinking"]),
    ("rollout.max_refills=9", "rollout.refill_zero_variance=true", ["rollout.max_refills"]),
    ("checkpoint.best_metric=eval/a", "checkpoint.keep_best=1", ["checkpoint.best_metric"]),
    ("checkpoint.best_is=lowest", "checkpoint.keep_best=1", ["checkpoint.best_is"]),
    ("tracking.max_roll_backs=7", "tracking.alarms=roll_back", ["tracking.max_roll_backs"]),
    ("rollout.agent={max_calls=3, thinking='template'}", "rollout.agent.harness=a:b",
     ["rollout.agent.thinking", "rollout.agent.max_calls"]),
    ("rollout.agent.call_timeout_s=3.0", 'rollout.agent.command=["a"]', ["rollout.agent.call_timeout_s"]),
    ("rollout.sglang.num_own_servers=2", "rollout.engine=sglang", ["rollout.sglang.num_own_servers"]),
    ("sglang.tp_size=2", "rollout.engine=sglang", ["sglang"]),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "switch", "keys"), IDLE, ids=lambda each: str(each)[:30])
def test_settings_without_effect_are_named(setting: str, switch: str, keys: list[str]) -> None:
    assert [key for key, _ in idle_settings(load_config([], [setting]))] == keys
    assert [key for key, _ in idle_settings(load_config([], [setting, switch]))] == []
    for key, needs in idle_settings(load_config([], [setting])):
        assert needs.text.partition(" ")[0].rpartition(".")[0] in switch, key


def test_a_default_that_is_written_out_is_no_setting_without_effect() -> None:
    assert list(idle_settings(Config())) == []
    written = tomllib.loads(dump_config(Config()))
    assert list(idle_settings(Config.model_validate(written))) == []
