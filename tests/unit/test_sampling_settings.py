"""SGLang's settings that change the sampling: set by the package, refused, or sent in each request."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.engines.sglang.options import shipped_options
from megatron_dppo.engines.sglang.protocol import GENERATIONS, NEWEST, generation_of
from megatron_dppo.engines.sglang.sampling_settings import (
    REFUSED_ARGUMENTS,
    SET,
    argument_problems,
    seed_of,
    variable_problems,
)
from megatron_dppo.errors import ServerError

REPLIES = Path(__file__).parent / "sglang_replies"
REFUSED: dict[str, Any] = {
    "speculative_accept_threshold_single": 0.9,
    "speculative_accept_threshold_acc": 0.5,
    "enable_watermark": True,
    "watermark_config": '{"enforce_all": true}',
    "enable_strict_thinking": True,
    "dllm_algorithm": "LowConfidence",
    "rl_on_policy_target": "fsdp",
    "allow_auto_truncate": True,
    "json_model_override_args": '{"rope_theta": 1}',
    "decrypted_config_file": "other.json",
    "modelopt_checkpoint_restore_path": "other",
    "kt_weight_path": "other",
    "kt_max_deferred_experts_per_token": 1,
    "forward_hooks": '[{"target_modules": ["lm_head"]}]',
    "hicache_storage_backend": "file",
    "enable_lmcache": True,
    "enable_flexkv": True,
    "enable_unified_cache_external_linker": True,
}
HARMLESS: dict[str, Any] = {
    "enable_watermark": False,
    "json_model_override_args": "{}",
    "speculative_accept_threshold_single": 1.0,
    "kv_cache_dtype": "fp8_e4m3",
    "enable_deterministic_inference": True,
    "speculative_algorithm": "NGRAM",
}


def test_every_listed_argument_is_one_of_the_newest_server() -> None:
    assert SET.keys() | REFUSED_ARGUMENTS.keys() <= shipped_options(NEWEST).keys()
    assert REFUSED.keys() == REFUSED_ARGUMENTS.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_changes_the_sampling_is_refused_in_a_table_and_of_a_server(name: str) -> None:
    (problem,) = argument_problems({name: REFUSED[name]})
    assert problem.where == f"sglang.{name}" and REFUSED_ARGUMENTS[name].effect in str(problem)
    with pytest.raises(ServerError, match=name):
        _read({name: REFUSED[name]})


@pytest.mark.parametrize("name", SET)
def test_an_argument_that_the_package_sets_is_refused(name: str) -> None:
    (problem,) = argument_problems({name: "model"})
    assert f"it is set by {SET[name]}" in str(problem)


def test_other_arguments_are_left_alone() -> None:
    assert list(argument_problems(HARMLESS)) == []
    _read(
        HARMLESS
        | {
            "watermark_config": "<redacted>",
            "sampling_defaults": "model",
            "forward_hooks": None,
            "preferred_sampling_params": None,
        }
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "1"),
        ("SGL_RETURN_ORIGINAL_LOGPROB", "true"),
        ("SGLANG_SIMULATE_ACC_LEN", "2.5"),
        ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "yes"),
        ("SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB", "0.1"),
        ("SGLANG_TEST_DISAGG_FAILURE_PROB", "0.5"),
        ("SGLANG_MAX_NEW_TOKENS_LIMIT", "128"),
        ("SGLANG_MAX_THINK_TOKENS", "64"),
        ("SGLANG_RUST_SERVER", "1"),
        ("SGLANG_HTTP_SERVER_APP_PATH", "own.server:app"),
        ("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "true"),
        ("SGLANG_EXTERNAL_MODEL_PACKAGE", "own_models"),
        ("SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR", "0.5"),
    ],
)
def test_an_environment_variable_that_changes_the_sampling_is_refused(name: str, value: str) -> None:
    (problem,) = variable_problems({name: value, "PATH": "/bin"})
    assert f"found {name}={value}" in str(problem) and f"Unset {name}" in str(problem)
    with pytest.raises(ServerError, match=name):
        _read({"internal_states": [{"env_vars": {name: value}}]})


def test_environment_variables_without_an_effect_are_left_alone() -> None:
    harmless = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
        "SGLANG_SIMULATE_ACC_LEN": "-1",
        "SGLANG_MAX_THINK_TOKENS": "-1",
        "SGLANG_TORCH_PROFILER_DIR": "/tmp",
        "SGLANG_RETURN_ORIGINAL_LOGPROBS": "1",
        "SGLANG_HTTP_SERVER_APP_PATH": "sglang.srt.entrypoints.http_server:app",
        "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": "0",
    }
    assert list(variable_problems(harmless)) == []


def test_a_server_with_another_front_end_is_refused() -> None:
    with pytest.raises(ServerError, match="frontend = 'rust'; expected 'python'"):
        _read({"frontend": "rust"})


def test_seeds_differ_between_samples_and_stay() -> None:
    keys = [(seed, rollout, sample) for seed in range(8) for rollout in range(8) for sample in range(64)]
    seeds = [seed_of(key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of((1, 2, 3)) == seed_of((1, 2, 3)) == 2904650318439132554


def _read(changes: dict[str, Any]) -> None:
    for version in GENERATIONS:
        facts = json.loads((REPLIES / version / "facts.json").read_text())
        generation_of(version).read_facts(facts["server_info"] | changes, facts["model_info"])


def test_retractions_may_be_provoked() -> None:
    """They change no sampling, and tests of them need a server that retracts."""
    assert not list(variable_problems({"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "50"}))
