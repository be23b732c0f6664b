"""The experiments have the paper's numbers, typed here from its sections 5 to 7, Table 1 and Appendices D to G.

The sizes of Appendix G.3 are from the standard scripts of Oat and Gem, which it names. The lengths of runs are
the ends of the axes in the authors' images of Figures 1 and 3, and the last ticks of the others in version 3.
test_numbers.py holds every other number.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.paper_rules import Divergence, Ratio
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from tests.support.experiments import ALGORITHMS, EXPERIMENTS, Algorithm, model_of

COLUMNS = ("moe_base", "moe_base_r3", "moe_thinking", "dense_base", "moe_base_lora")
TABLE_1: dict[str, tuple[Any, ...]] = {
    "max prompt length": (1024, 1024, 1024, 1024, 1024),
    "max response length": (16384, 16384, 16384, 8000, 8000),
    "train batch size": (256, 256, 256, 128, 128),
    "mini-batch size": (32, 32, 32, 32, 16),
    "responses per prompt": (16, 16, 16, 8, 8),
    "learning rate": (1e-6, 1e-6, 1e-6, 1e-6, 1e-5),
    "temperature": (1.0, 1.0, 1.0, 1.0, 1.0),
    "LoRA rank": (0, 0, 0, 0, 32),
    "routing replay": (False, True, False, False, False),
}
APPENDIX_F: dict[str, dict[str, Any]] = {
    "grpo_clip_higher": {"eps_low": 0.2, "eps_high": 0.27},
    "cispo": {},
    "dppo_binary_tv": {"delta_low": 0.2, "delta_high": 0.2},
    "dppo_binary_kl": {"delta_low": 0.05, "delta_high": 0.05},
}
TV_OF_LORA = 0.15
RATIO_CAP = 5.0
EVALUATION = {"samples_per_prompt": 32, "temperature": 0.7, "top_p": 0.95, "max_response_tokens": None}
EVALUATED_EVERY = (5, 5, 5, 10, 10)
LORA_ALPHA = 64
MODEL_OF_G_2 = "Qwen3-30B-A3B-Base"  # section 7, too
APPENDIX_G_2: dict[str, dict[str, Any]] = {
    "dppo_binary_tv": {"delta_low": 0.2, "delta_high": 0.2},
    "dppo_binary_kl": {"delta_low": 0.05, "delta_high": 0.05},
    "dppo_topk_tv": {"delta_low": 0.2, "delta_high": 0.2, "top_k": 20},
    "dppo_topk_kl": {"delta_low": 0.05, "delta_high": 0.05, "top_k": 20},
}
APPENDIX_G_3: dict[str, dict[str, Any]] = {
    "other_families": {"episodes": 128 * 8, "responses": 8, "steps": 8, "max response length": 4096},
    "gem_tasks": {"episodes": 128, "passes": 2, "steps": 2},
}
ROLLOUTS_OF_FIGURE_17 = {"grpo": 350, "dppo_binary_tv": 350, "arc_1d": 120, "acre": 120, "sudoku_v0_easy": 400}
SUDOKU_OF_G_3 = {"turns": 15, "tokens of a turn": 4096, "tokens of all": 12_800}
TV_OF_G_3, CLIP_OF_G_3, BETA_2_OF_G_3 = 0.2, 0.2, 0.95
_CLIP_HIGHER = {"rule": "ratio", "eps_low": 0.2, "eps_high": 0.28, "relax": "none"}
_SECTION_5 = {"rule": "negative", "delta_low": 0.5}
APPENDIX_D: dict[str, dict[str, Any]] = {
    "pg_is": {"rule": "none"},
    "pg_tis": {"rule": "none", "ratio_cap": 3.0},
    "grpo_clip_higher": _CLIP_HIGHER,
    "minirl": _CLIP_HIGHER | {"anchor": "recomputed"},
    "minirl_tis": _CLIP_HIGHER | {"anchor": "recomputed", "ratio_cap": 3.0},
    "dppo_binary_tv": {"divergence": "binary_tv", "delta_low": 0.15, "delta_high": 0.15},
    "dppo_binary_kl": {"divergence": "binary_kl", "delta_low": 0.05, "delta_high": 0.05},
    "dppo_binary_kl_decoupled": {
        "divergence": "binary_kl",
        "delta_low": 0.05,
        "delta_high": 0.05,
        "anchor": "recomputed",
    },
    "negative_mask_0.5": _SECTION_5,
    "negative_mask_0.8": _SECTION_5 | {"delta_low": 0.8},
    "negative_mask_0.5_recomputed": _SECTION_5 | {"anchor": "recomputed"},
}
"""With section 5.3's masks. Where it gives no anchor or cap, they are the rollout policy and none."""
SIZES_OF_D = {"prompts": 64, "responses": 8, "steps": 4, "context": 8000, "evaluated responses": 32}
ALPHAS_OF_FIGURE_6 = (0.1, 0.3, 0.5, 0.7)  # version 3's legend, without the 0 of the plain clip
SECTION_6: dict[str, dict[str, Any]] = {
    "grpo_clip_higher": _CLIP_HIGHER,
    "relax_high_0.1": _CLIP_HIGHER | {"relax": "high", "alpha": 0.1},
    "relax_low_0.1": _CLIP_HIGHER | {"relax": "low", "alpha": 0.1},
    **{f"relax_both_{alpha}": _CLIP_HIGHER | {"relax": "both", "alpha": alpha} for alpha in ALPHAS_OF_FIGURE_6},
}
APPENDIX_E: dict[str, dict[str, Any]] = {"grpo_clip_higher": _CLIP_HIGHER}
STEP_OF_E = 50
OTHERS = {
    "stability": ("DeepSeek-R1-Distill-Qwen-1.5B", APPENDIX_D),
    "efficiency": ("Qwen3-1.7B-Base", SECTION_6),
    "clipped_tokens": ("Qwen3-4B-Base", APPENDIX_E),
}
"""Model and objectives, by folder."""
LAST_ROLLOUT_OF_FIGURES = {
    "stability": 3600,
    "efficiency": 500,
    "moe_base": 210,
    "moe_base_r3": 210,
    "topk_ablation": 210,
    "moe_thinking": 250,
    "dense_base": 1400,
    "moe_base_lora": 900,
    "other_families": 350,
    "gem_tasks": 120,
}
APART_IN_FIGURE_3 = 50
SCALING = [algorithm for algorithm in ALGORITHMS if algorithm.experiment in COLUMNS]
TOPK = [algorithm for algorithm in ALGORITHMS if algorithm.experiment == "topk_ablation"]
UNSCALED = [algorithm for algorithm in ALGORITHMS if algorithm.experiment in OTHERS]
FAMILIES_AND_TASKS = [algorithm for algorithm in ALGORITHMS if algorithm.experiment in APPENDIX_G_3]


def _table_row(config: Config) -> dict[str, Any]:
    return {
        "max prompt length": config.data.max_prompt_tokens,
        "max response length": config.rollout.max_response_tokens,
        "train batch size": config.rollout.prompts_per_rollout,
        "mini-batch size": config.rollout.prompts_per_rollout // config.algorithm.minibatches_per_rollout,
        "responses per prompt": config.rollout.samples_per_prompt,
        "learning rate": config.optimizer.lr,
        "temperature": config.rollout.temperature,
        "LoRA rank": config.lora.rank,
        "routing replay": config.rollout.routing_replay == "replay",
    }


def _objective(algorithm: Algorithm) -> Objective:
    options = load_config(algorithm.layers).algorithm
    return preset(options.preset, **overrides_in(options.model_dump()))


def test_all_columns_have_all_algorithms() -> None:
    assert {(each.experiment, each.name) for each in SCALING} == {(c, a) for c in COLUMNS for a in APPENDIX_F}


@pytest.mark.parametrize("algorithm", SCALING, ids=str)
def test_an_experiment_is_a_column_of_table_1(algorithm: Algorithm) -> None:
    config = load_config(algorithm.layers)
    column = COLUMNS.index(algorithm.experiment)
    assert _table_row(config) == {name: row[column] for name, row in TABLE_1.items()}
    assert config.algorithm.epochs_per_rollout == 1
    assert not config.lora.rank or config.lora.alpha == LORA_ALPHA


@pytest.mark.parametrize("algorithm", SCALING, ids=str)
def test_an_algorithm_has_the_thresholds_of_appendix_f(algorithm: Algorithm) -> None:
    objective = _objective(algorithm)
    expected = APPENDIX_F[algorithm.name]
    if (algorithm.experiment, algorithm.name) == ("moe_base_lora", "dppo_binary_tv"):
        expected = dict.fromkeys(expected, TV_OF_LORA)
    assert objective.name == algorithm.name
    assert {field: getattr(objective, field) for field in expected} == expected
    assert objective.ratio_cap == RATIO_CAP
    assert objective.anchor == "rollout"


@pytest.mark.parametrize("algorithm", SCALING, ids=str)
def test_evaluation_equals_appendix_f(algorithm: Algorithm) -> None:
    evaluation = load_config(algorithm.layers).evaluation
    assert evaluation.model_dump(include=set(EVALUATION)) == EVALUATION
    assert evaluation.every == EVALUATED_EVERY[COLUMNS.index(algorithm.experiment)]
    assert evaluation.sets.keys() == {"aime24", "aime25"}


@pytest.mark.parametrize("algorithm", TOPK, ids=str)
def test_topk_ablation_equals_appendix_g_2(algorithm: Algorithm) -> None:
    objective, expected = _objective(algorithm), APPENDIX_G_2[algorithm.name]
    assert {each.name for each in TOPK} == APPENDIX_G_2.keys()
    assert model_of(algorithm.experiment) == MODEL_OF_G_2
    assert objective.name == algorithm.name
    assert {field: getattr(objective, field) for field in expected} == expected
    assert objective.ratio_cap == RATIO_CAP
    assert load_config(algorithm.layers).rollout.num_topk_log_probs == 20


@pytest.mark.parametrize("algorithm", FAMILIES_AND_TASKS, ids=str)
def test_other_families_and_tasks_have_the_sizes_of_appendix_g_3(algorithm: Algorithm) -> None:
    config = load_config(algorithm.layers)
    passes, responses = config.algorithm.epochs_per_rollout, config.rollout.samples_per_prompt
    sizes = {
        "episodes": config.rollout.prompts_per_rollout * responses,
        "responses": responses,
        "passes": passes,
        "steps": config.algorithm.minibatches_per_rollout * passes,
        "max response length": config.rollout.max_response_tokens,
    }
    expected = APPENDIX_G_3[algorithm.experiment]
    assert {name: sizes[name] for name in expected} == expected
    (of_figure,) = [n for task, n in ROLLOUTS_OF_FIGURE_17.items() if algorithm.name.startswith(task)]
    assert config.run.num_rollouts == of_figure
    assert config.optimizer.beta2 == BETA_2_OF_G_3
    objective = _objective(algorithm)
    assert objective.name in ("grpo", "dppo_binary_tv")
    if objective.name == "dppo_binary_tv":
        assert isinstance(objective, Divergence)
        assert (objective.delta_low, objective.delta_high) == (TV_OF_G_3, TV_OF_G_3)
    else:
        assert isinstance(objective, Ratio)
        assert (objective.eps_low, objective.eps_high) == (CLIP_OF_G_3, CLIP_OF_G_3)
    assert (objective.anchor, objective.ratio_cap) == ("rollout", math.inf)


@pytest.mark.parametrize("algorithm", [each for each in FAMILIES_AND_TASKS if "sudoku" in each.name], ids=str)
def test_sudoku_has_the_limits_of_gem(algorithm: Algorithm) -> None:
    config = load_config(algorithm.layers)
    assert {
        "turns": config.rollout.max_turns,
        "tokens of a turn": config.rollout.max_turn_tokens,
        "tokens of all": config.data.max_prompt_tokens + config.rollout.max_response_tokens,
    } == SUDOKU_OF_G_3


def test_the_folders_of_sections_5_and_6_and_appendix_e_have_all_algorithms() -> None:
    found = {(each.experiment, each.name) for each in UNSCALED}
    assert found == {(folder, name) for folder, (_, objectives) in OTHERS.items() for name in objectives}


@pytest.mark.parametrize("algorithm", UNSCALED, ids=str)
def test_an_algorithm_is_the_one_of_sections_5_and_6_and_appendix_e(algorithm: Algorithm) -> None:
    model, objectives = OTHERS[algorithm.experiment]
    expected = {"anchor": "rollout", "ratio_cap": math.inf} | objectives[algorithm.name]
    objective = _objective(algorithm)
    assert {field: getattr(objective, field) for field in expected} == expected
    assert model_of(algorithm.experiment) == model


def test_stability_has_the_sizes_of_appendix_d() -> None:
    config = load_config([Path("examples/stability/base.toml")])
    assert {
        "prompts": config.rollout.prompts_per_rollout,
        "responses": config.rollout.samples_per_prompt,
        "steps": config.algorithm.minibatches_per_rollout * config.algorithm.epochs_per_rollout,
        "context": config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        "evaluated responses": config.evaluation.samples_per_prompt,
    } == SIZES_OF_D
    assert (config.model.dtype, config.optimizer.lr) == ("bfloat16", 1e-6)
    assert config.evaluation.every == APART_IN_FIGURE_3


def test_the_tokens_of_appendix_e_are_listed_at_its_step() -> None:
    config = load_config([Path("examples/clipped_tokens/base.toml")])
    assert config.run.num_rollouts >= STEP_OF_E
    assert STEP_OF_E % config.tracking.clipped_tokens_every == 0


@pytest.mark.parametrize("folder", LAST_ROLLOUT_OF_FIGURES)
def test_run_length_covers_the_papers_figure(folder: str) -> None:
    """At a constant learning rate, so that a longer run repeats a shorter one."""
    config = load_config([Path("examples") / folder / "base.toml"])
    assert config.run.num_rollouts == LAST_ROLLOUT_OF_FIGURES[folder]
    assert config.optimizer.schedule == "constant"


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_an_overlay_is_named_after_its_preset_and_replay(algorithm: Algorithm) -> None:
    config = load_config(algorithm.layers)
    assert config.algorithm.preset in re.sub(r"_[\d.]+(?=_|$)", "", algorithm.name)
    assert (config.rollout.routing_replay == "replay") == ("_r3" in str(algorithm))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_has_the_authors_aggregation_and_reward(experiment: str) -> None:
    config = load_config([Path("examples") / experiment / "base.toml"])
    assert config.algorithm.aggregation == "seq_mean_token_sum_norm"
    assert not config.algorithm.normalize_advantage_std
    assert config.optimizer.weight_decay == 0
    if "dapo" in config.data.prompts[0].path.name:
        assert (config.data.reward, config.data.reward_values) == ("dapo", (-1.0, 1.0))
