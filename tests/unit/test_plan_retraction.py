"""The load of SGLang's servers in a plan: cache for each request, and responses that a full cache retracts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.checks import model_facts
from megatron_dppo.cli import app
from megatron_dppo.config import load_config
from megatron_dppo.errors import ConfigError
from megatron_dppo.plan.job import Machine
from megatron_dppo.plan.retraction import (
    VISIBLE,
    Policy,
    Retraction,
    Server,
    plan_retraction,
    response_lengths,
    retraction_remarks,
    simulate,
)
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


def planned(*overrides: str, num_gpus: int = 16, mean: float | None = None) -> Retraction | None:
    config = load_config([Path("base.toml")], list(overrides))
    facts = model_facts(config, num_gpus)
    assert isinstance(facts.model, dict)
    return plan_retraction(config, model_shape(facts.model), Machine(num_gpus, 80 * 10**9), mean)


def test_a_server_retracts_what_sglang_s_scheduler_did() -> None:
    """Recorded from SGLang 0.5.23 by tests/sglang/scheduler_reading.py, which tests compare at more sizes."""
    server = Server(700, 12, 200, 50, 0.25, Policy(decay_steps=50, most_new_tokens=60))
    prompts = [28, 33, 5, 33, 21, 23, 27, 15, 39, 6, 14, 18, 24, 19, 9, 6]
    lengths = [103, 83, 155, 101, 60, 124, 200, 198, 53, 34, 56, 96, 14, 78, 34, 52]
    served = simulate(server, np.array(prompts), np.array(lengths))
    assert served.num_retractions.tolist() == [0, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert served.num_decode_steps == 216
    assert served.share == 3 / 16


def test_a_cache_that_holds_everything_retracts_nothing() -> None:
    prompts, lengths = np.full(300, 200), response_lengths(300, 6000, 16384)
    served = simulate(Server(300 * (200 + 16384) + 1, 300, 16384), prompts, lengths)
    assert served.share == 0
    assert served.num_decode_steps == lengths.max() - 1  # prefill samples the first token


def test_fewer_requests_at_once_are_retracted_less_and_take_more_steps() -> None:
    prompts, lengths = np.full(1024, 200), response_lengths(1024, 7000, 16384)
    served = [
        simulate(Server(1_660_000, running, 16384), prompts, lengths) for running in (1024, 512, 256, 128)
    ]
    shares, steps = [each.share for each in served], [each.num_decode_steps for each in served]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.3 and shares[-1] == 0
    assert steps[-1] > steps[0]


@pytest.mark.parametrize(("mean", "longest"), [(1, 64), (500, 16384), (4096, 16384), (8192, 16384), (90, 100)])
def test_lengths_have_the_mean_that_is_asked_for(mean: int, longest: int) -> None:
    lengths = response_lengths(2000, mean, longest)
    assert lengths.mean() == pytest.approx(mean, rel=0.02, abs=0.5)
    assert lengths.min() >= 1 and lengths.max() <= longest
    assert (lengths == response_lengths(2000, mean, longest)).all()


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
def test_what_a_server_gets_and_holds(overrides: tuple[str, ...], expected: tuple[int, ...]) -> None:
    found = planned(*overrides)
    assert found is not None
    counts = (found.num_servers, found.num_requests, found.num_open, found.server.cached_tokens)
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
def test_nothing_is_simulated_without_a_known_cache_that_holds_a_sequence(overrides: tuple[str, ...]) -> None:
    assert planned(*overrides) is None


@pytest.mark.parametrize(
    "key",
    [
        *("max_running_requests", "max_total_tokens", "context_length"),
        *("chunked_prefill_size", "schedule_conservativeness"),
    ],
)
def test_an_option_that_is_no_number_is_refused_by_plan_alone(key: str) -> None:
    config = load_config([Path("base.toml")], [f"sglang.{key}=many"])
    with pytest.raises(ConfigError) as raised:
        planned(f"sglang.{key}=many")
    assert [problem.where for problem in raised.value.problems] == [f"sglang.{key}"]
    assert retraction_remarks(config, model_facts(config, 16)) == []


def plan(base: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", str(base), *GPUS, *arguments])


def test_plan_prints_the_cache_of_a_request_and_the_share_that_is_retracted(base: Path) -> None:
    text = plan(base).stdout.replace("\n    ", " ")
    assert "A server gets 2048 requests and runs 2048 at once, with 960 tokens of cache for each." in text
    assert "retracts at least once: 34.9% at a mean of 4096 tokens, 70.9% at a mean of 8192 tokens." in text
    assert "Simulated for 2 servers: " in text and "assumed (--assume response_tokens=" in text
    found = json.loads(plan(base, "--json", "--assume", "response_tokens=2100").stdout)["retraction"]
    assert found["shares"] == [{"response_tokens": 2100, "retracted": 0.0}]
    assert (found["open_requests"], found["tokens_per_request"]) == (2048, 960)
    assert "the mean is as given" in plan(base, "--assume", "response_tokens=2100").stdout.replace(
        "\n    ", " "
    )
    assert plan(base, "--assume", "response_tokens=2100", "--assume", "token_s=1").exit_code == 2
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
    (note,) = (line for line in shown.stderr.splitlines() if line.startswith("note: SGLang is expected"))
    assert "retract 35% of the responses" in note and "960 tokens" in note
    assert "With sglang.tp_size = 4 and sglang.max_running_requests = 512, none is." in note
    followed = ["--set", "sglang.tp_size=4", "--set", "sglang.max_running_requests=512"]
    shown = CliRunner().invoke(app, ["check", str(base), "--world-size", "16", *followed])
    assert "SGLang is expected" not in shown.stderr


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "is_noted"),
    [
        ((), 16, True),
        (("sglang.tp_size=4",), 16, True),  # 3 % of the responses
        (("sglang.max_running_requests=1024",), 16, False),
        ((), 12, False),  # a rule is about the layout
        (("rollout.max_response_tokens=9000",), 16, False),
    ],
)
def test_a_note_is_about_a_visible_share(overrides: tuple[str, ...], num_gpus: int, is_noted: bool) -> None:
    config = load_config([Path("base.toml")], list(overrides))
    assert bool(retraction_remarks(config, model_facts(config, num_gpus))) == is_noted


def test_a_share_above_the_limit_of_dropped_samples_is_noted() -> None:
    overrides = ["sglang.tp_size=4", "rollout.max_response_tokens=15800"]
    found = planned(*overrides)
    assert found is not None and 0 < found.expected < VISIBLE
    for limit, is_noted in ((found.expected / 2, True), (VISIBLE, False)):
        config = load_config([Path("base.toml")], [*overrides, f"rollout.max_dropped_fraction={limit}"])
        assert bool(retraction_remarks(config, model_facts(config, 16))) == is_noted
