"""The experiments are those of the paper's Table 1 and Appendices F and G, typed here from the paper.

The sizes of Appendix G.3 are those of the standard scripts of Oat and Gem, which it names.
"""

from typing import Any

import pytest
from experiments import ALGORITHMS, Algorithm, model_of

from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config

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
    "gem_tasks": {"episodes": 128, "passes": 2},
}
TV_OF_G_3 = 0.2
SCALING = [algorithm for algorithm in ALGORITHMS if algorithm.experiment in COLUMNS]
TOPK = [algorithm for algorithm in ALGORITHMS if algorithm.experiment == "topk_ablation"]
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
def test_evaluation_is_that_of_appendix_f(algorithm: Algorithm) -> None:
    evaluation = load_config(algorithm.layers).evaluation
    assert evaluation.model_dump(include=set(EVALUATION)) == EVALUATION
    assert evaluation.every == EVALUATED_EVERY[COLUMNS.index(algorithm.experiment)]
    assert evaluation.sets.keys() == {"aime24", "aime25"}


@pytest.mark.parametrize("algorithm", TOPK, ids=str)
def test_the_topk_ablation_is_that_of_appendix_g_2(algorithm: Algorithm) -> None:
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
    objective = _objective(algorithm)
    assert objective.name in ("grpo", "dppo_binary_tv")
    if objective.name == "dppo_binary_tv":
        assert (objective.delta_low, objective.delta_high) == (TV_OF_G_3, TV_OF_G_3)
