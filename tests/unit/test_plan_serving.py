"""The load of SGLang's servers in a plan: cache for each request, and a warning if it is too small."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.checks import model_facts
from megatron_dppo.cli import app
from megatron_dppo.config import load_config
from megatron_dppo.errors import ConfigError
from megatron_dppo.plan.job import Machine
from megatron_dppo.plan.serving import ServerLoad, load_remarks, server_load
from tests.support.plan_models import ON_16_GPUS, QWEN3_30B

BASE = f"""{ON_16_GPUS}
[data]
prompts = "prompts.jsonl"
max_prompt_tokens = 1024
reward = "dapo"
"""
SEPARATE = "rollout.sglang.colocated=false"
GPUS = ("--gpus", "16", "--gpu-memory", "80GB")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_30B))
    Path("base.toml").write_text(BASE)
    return Path("base.toml")


def loaded(*overrides: str, num_gpus: int = 16, mean: float | None = None) -> ServerLoad | None:
    config = load_config([Path("base.toml")], list(overrides))
    facts = model_facts(config, num_gpus)
    assert isinstance(facts.model, dict)
    return server_load(config, model_shape(facts.model), Machine(num_gpus, 80 * 10**9), mean)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (2, 2048, 2048, 1_968_057)),
        (("sglang.tp_size=4",), (4, 1024, 1024, 1_657_468)),
        (("sglang.tp_size=4", "sglang.max_running_requests=300"), (4, 1024, 300, 1_657_468)),
        (("rollout.sglang.max_concurrent_requests=10",), (2, 2048, 160, 1_968_057)),
        (("sglang.max_total_tokens=90000",), (2, 2048, 2048, 90_000)),
        (("sglang.max_total_tokens=20000", "sglang.context_length=17408"), (2, 2048, 2048, 20_000)),
        (("rollout.samples_per_prompt=6",), (2, 768, 768, 1_968_057)),
        ((SEPARATE,), (2, 2048, 2048, 1_968_057)),
        ((SEPARATE, "rollout.sglang.num_own_servers=1"), (1, 4096, 4096, 1_968_057)),
        ((SEPARATE, "rollout.max_staleness=3", "rollout.over_sampling=2.0"), (2, 4096, 4096, 1_968_057)),
    ],
)
def test_a_server_gets_its_part_of_the_requests(overrides: tuple[str, ...], expected: tuple[int, ...]) -> None:
    found = loaded(*overrides)
    assert found is not None
    counts = (found.num_servers, found.num_requests, found.num_open, found.cached_tokens)
    assert counts == expected
    assert found.tokens_per_request == expected[3] // expected[2]


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.engine=transformers",),
        ("sglang.tp_size=32",),
        ("sglang.max_total_tokens=17000",),
        ("sglang.device=cpu",),
    ],
)
def test_the_load_is_unknown_without_a_cache_that_holds_a_sequence(overrides: tuple[str, ...]) -> None:
    assert loaded(*overrides) is None


@pytest.mark.parametrize("key", ["max_running_requests", "max_total_tokens", "context_length"])
def test_plan_refuses_an_option_that_is_no_number_and_check_leaves_it_to_a_rule(key: str) -> None:
    config = load_config([Path("base.toml")], [f"sglang.{key}=many"])
    with pytest.raises(ConfigError) as raised:
        loaded(f"sglang.{key}=many")
    assert [problem.where for problem in raised.value.problems] == [f"sglang.{key}"]
    assert load_remarks(config, model_facts(config, 16)) == []


def test_a_server_retracts_if_prompts_and_half_responses_exceed_its_cache() -> None:
    """100 requests of 20 and 60 / 2 tokens."""
    load = ServerLoad(5000, 1, 200, 100, 20.0, 60.0, is_separate=False, is_assumed=False)
    assert (load.mean_tokens, load.tokens_per_request, load.retracts) == (50.0, 50, False)
    short = replace(load, cached_tokens=4999)
    assert short.retracts and "sglang.max_running_requests to 99," in short.advice
    assert not replace(short, num_open=99).retracts


def plan(base: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(base), *GPUS, *arguments])


def test_plan_prints_the_cache_of_a_request_and_warns_if_it_is_small(base: Path) -> None:
    text = plan(base).stdout.replace("\n    ", " ")
    each = "Each of 2 servers gets 2048 requests and runs 2048 at once, with 960 tokens of cache for each."
    assert each in text
    assert "Warning: SGLang may retract responses" in text and "has 2304 in the cache. Lower" in text
    given = ("--assume", "response_tokens=1400")
    found = json.loads(plan(base, "--json", *given).stdout)["server_load"]
    assert (found["response_tokens"], found["mean_tokens"], found["retracts"]) == (1400, 956, False)
    assert (found["num_open"], found["tokens_per_request"]) == (2048, 960)
    enough = "That is enough for responses of 1400 tokens on average (as given)."
    assert enough in plan(base, *given).stdout.replace("\n    ", " ")
    assert plan(base, *given, "--assume", "token_s=1").exit_code == 2
    separate = plan(base, "--set", SEPARATE).stdout.replace("\n    ", " ")
    assert "2 servers on as many GPUs as the trainer's" in separate


@pytest.mark.parametrize(
    ("overrides", "begins", "keys"),
    [
        (("sglang.mem_fraction_static=0.05",), "Does not fit: the", "mem_fraction_static or sglang.tp_size"),
        (("sglang.max_total_tokens=9000",), "Does not fit: the", "max_total_tokens"),
        (
            (SEPARATE, "sglang.mem_fraction_static=0.05"),
            "Servers on GPUs of 74.5 GiB do not serve this: the",
            "mem_fraction_static or sglang.tp_size",
        ),
    ],
)
def test_a_cache_too_small_for_one_response_names_the_keys(
    base: Path, overrides: tuple[str, ...], begins: str, keys: str
) -> None:
    text = plan(base, *(word for each in overrides for word in ("--set", each))).stdout.replace("\n    ", " ")
    assert f"{begins} engine's cache holds " in text
    assert f"has 17408. Raise sglang.{keys}, or lower rollout.max_response_tokens." in text


def test_check_names_the_keys_that_help(base: Path) -> None:
    shown = CliRunner().invoke(app, ["check", str(base), "--world-size", "16"])
    (note,) = (line for line in shown.stderr.splitlines() if line.startswith("note: SGLang may retract"))
    assert "960 tokens for each" in note
    assert "Lower sglang.max_running_requests to 854, or try another sglang.tp_size." in note
    followed = ["--set", "sglang.max_running_requests=854"]
    shown = CliRunner().invoke(app, ["check", str(base), "--world-size", "16", *followed])
    assert "SGLang may retract" not in shown.stderr


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "is_noted"),
    [
        ((), 16, True),
        (("sglang.tp_size=4",), 16, True),
        (("sglang.max_running_requests=855",), 16, True),
        (("sglang.max_running_requests=854",), 16, False),
        ((), 12, False),  # a rule is about the layout
        (("rollout.max_response_tokens=5600",), 16, False),
    ],
)
def test_check_notes_a_cache_that_is_too_small(
    overrides: tuple[str, ...], num_gpus: int, is_noted: bool
) -> None:
    config = load_config([Path("base.toml")], list(overrides))
    assert bool(load_remarks(config, model_facts(config, num_gpus))) == is_noted
