"""`megatron-dppo plan`: the table, the JSON, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_models import QWEN3_30B
from typer.testing import CliRunner

from megatron_dppo.actor.layout import layout_problems, model_sizes
from megatron_dppo.cli import app
from megatron_dppo.config.schema import ParallelConfig
from megatron_dppo.errors import Problem
from megatron_dppo.plan.moments import COMPONENTS, MOMENTS

BASE = """
[model]
load = "model"
[parallel]
tensor = 4
expert = 8
expert_tensor = 1
max_tokens_per_microbatch = 20480
[rollout]
engine = "sglang"
max_response_tokens = 8192
routing_replay = "replay"
num_topk_log_probs = 20
[algorithm]
minibatches_per_rollout = 1
[sglang]
tp_size = 8
mem_fraction_static = 0.7
"""
GPUS = ("--gpus", "8", "--gpu-memory", "80GB")
ROOMY = ("--recompute", "full", "--offload-optimizer")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with base.toml and a model folder that holds nothing but config.json."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_30B))
    Path("base.toml").write_text(BASE)
    return Path("base.toml")


def _plan(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def _refusals() -> list[Problem]:
    """What layout.py has against the configured layout, today."""
    sizes = model_sizes(QWEN3_30B)
    return layout_problems(ParallelConfig(tensor=4, expert=8, expert_tensor=1), 8, sizes)


def test_the_table_of_a_run_that_fits(base: Path) -> None:
    result = _plan(base, *GPUS, *ROOMY, "--host-memory", "2TB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "Qwen3MoeForCausalLM, 30.53 B parameters (3.35 B active), bfloat16"
    assert lines[1] == "8 GPUs, 8 to a node, 74.5 GiB each, hosts of 1862.6 GiB"
    assert "recompute full, optimizer on the host" in lines[2]
    (header,) = (line for line in lines if line.split() == list(MOMENTS))
    rows = {line[:26].strip(): line for line in lines if len(line.split()) > len(MOMENTS)}
    rows = {name: line for name, line in rows.items() if name in {*COMPONENTS, "total"}}
    assert set(COMPONENTS) - set(rows) == {"optimizer"}
    assert {len(row) for row in rows.values()} == {len(header)}
    assert rows["parameters"].split()[1:] == ["7.49", "7.49", "7.49", "-", "7.49"]
    for column, moment in enumerate(MOMENTS):
        values = [row.split()[-5 + column] for name, row in rows.items() if name != "total"]
        total = sum(float(value) for value in values if value != "-")
        assert total == pytest.approx(float(rows["total"].split()[1 + column]), abs=0.06), moment
    assert "Engine and trainer take turns on the GPU" in result.stdout
    assert any(line.startswith("Verdict: Fits: 58.2 of 74.5 GiB in the rollout") for line in lines)
    assert sum(line.startswith("Advice: ") for line in lines) == 1
    assert ("megatron-dppo train refuses this layout: parallel: " in result.stdout) == bool(_refusals())
    assert "  1." in result.stdout
    assert "optimizer offload]" in result.stdout


def test_a_run_that_does_not_fit_says_what_dominates_and_ends_with_1(base: Path) -> None:
    result = _plan(base, *GPUS, "--recompute", "full")
    assert result.exit_code == 1
    verdict = (
        "Verdict: Does not fit: 84.7 of 74.5 GiB in the optimizer's step, most of it optimizer (56.9 GiB)."
    )
    assert verdict in result.stdout.splitlines()
    assert "Advice: Keep Adam on the host (--offload-optimizer" in result.stdout


def test_json_has_the_same_numbers_in_bytes(base: Path) -> None:
    result = _plan(base, *GPUS, *ROOMY, "--json", "--proposals", "2")
    content: dict[str, Any] = json.loads(result.stdout)
    assert set(content) == {
        "model",
        "machine",
        "loss",
        "assumptions",
        "fits",
        "verdict",
        "advice",
        "not_counted",
        "problems",
        "configured",
        "configured_step_s",
        "proposals",
        "num_divisible_layouts",
        "num_fitting_layouts",
    }
    assert content["fits"] is True
    assert content["model"]["parameters"] == 30_532_122_624
    configured = content["configured"]
    (stage,) = configured["stages"]
    assert set(stage["moments"]) == set(MOMENTS)
    assert configured["peak_bytes"] == sum(stage["moments"][configured["worst_moment"]].values())
    assert configured["options"]["recompute"]["granularity"] == "full"
    assert [problem["where"] for problem in content["problems"]] == [problem.where for problem in _refusals()]
    assert len(content["proposals"]) == 2
    for proposal in content["proposals"]:
        assert proposal["megatron"]["recompute_granularity"] == "full"
        assert "optimizer offload" in proposal["missing"]
        assert not proposal["is_admitted"]
        assert proposal["step_s"]["total"] > 0


def test_a_pipeline_shows_each_stage(base: Path) -> None:
    layout = ("--set", "parallel.tensor=1", "--set", "parallel.pipeline=4", "--set", "parallel.expert=2")
    result = _plan(base, *GPUS, *ROOMY, *layout, "--separate-engine")
    assert "of pipeline stage 0" in result.stdout
    uneven = ("--set", "megatron.num_layers_in_last_pipeline_stage=18")
    assert "of pipeline stage 3" in _plan(base, *GPUS, *ROOMY, *layout, *uneven, "--separate-engine").stdout
    assert "peak of each pipeline stage: " in result.stdout


def test_configs_layer_and_recompute_is_read_from_the_pass_through_table(base: Path) -> None:
    Path("more.toml").write_text('[megatron]\nrecompute_granularity = "full"\nrecompute_num_layers = 2\n')
    result = _plan(base, "more.toml", "--set", "parallel.max_tokens_per_microbatch=10240", *GPUS)
    assert "recompute full (uniform, 2)" in result.stdout
    assert "of up to 10240 tokens" in result.stdout
    assert "recompute none" in _plan(base, "more.toml", *GPUS, "--recompute", "none").stdout


def test_the_loss_is_read_from_the_config_unless_it_is_given(base: Path) -> None:
    chunks = ("--set", "algorithm.logits_chunk_bytes=268435456")
    assert "loss: from hidden states, logits made 0.50 GiB at a time" in _plan(base, *GPUS).stdout
    assert "loss: from hidden states, logits made 0.25 GiB at a time" in _plan(base, *GPUS, *chunks).stdout
    whole = "loss: from the logits of a whole micro-batch"
    assert whole in _plan(base, *GPUS, "--set", "algorithm.loss_from=logits").stdout
    assert whole in _plan(base, *GPUS, "--loss-from", "logits").stdout
    content = json.loads(_plan(base, *GPUS, *chunks, "--json").stdout)
    assert content["loss"] == {
        "loss_from": "hidden_states",
        "logits_chunk_bytes": 268435456,
        "logits_dtype": "model",
    }


def test_options_that_the_sums_do_not_know_are_named(base: Path) -> None:
    modules = 'megatron.recompute_modules=["moe", "layernorm"]'
    result = _plan(base, *GPUS, "--recompute", "selective", "--set", "megatron.fp8=hybrid", "--set", modules)
    assert "not counted: megatron.fp8 = 'hybrid'" in result.stdout
    assert "not counted: megatron.recompute_modules: 'layernorm' is taken to save nothing" in result.stdout
    assert "not counted" not in _plan(base, *GPUS).stdout


def test_an_uneven_pipeline_is_counted(base: Path) -> None:
    Path("model/config.json").write_text(json.dumps(QWEN3_30B | {"num_hidden_layers": 46}))
    pipeline = [
        f"--set=parallel.{key}={size}" for key, size in {"tensor": 1, "pipeline": 4, "expert": 2}.items()
    ]
    ends = [f"--set=megatron.num_layers_in_{end}_pipeline_stage=11" for end in ("first", "last")]
    result = _plan(base, *GPUS, *ROOMY, *pipeline, *ends)
    assert "peak of each pipeline stage: " in result.stdout
    assert "cannot be laid out" in _plan(base, *GPUS, *ROOMY, *pipeline).stdout


def test_a_separate_engine_is_left_out(base: Path) -> None:
    result = _plan(base, *GPUS, *ROOMY, "--separate-engine")
    assert "SGLang on GPUs of its own" in result.stdout
    assert "engine cache" not in result.stdout


def test_a_layout_that_cannot_be_laid_out_still_gets_proposals(base: Path) -> None:
    result = _plan(base, "--gpus", 12, "--gpu-memory", "80GB")
    assert result.exit_code == 1
    assert "Verdict: The configured layout cannot be laid out on these GPUs." in result.stdout
    assert "found 8; expected a divisor of the 12 processes" in result.stdout
    assert "Layouts for 12 GPUs that fit" in result.stdout


def test_layouts_that_leave_prompts_over_are_mentioned(base: Path) -> None:
    result = _plan(base, *GPUS, "--set", "rollout.prompts_per_rollout=2")
    assert "whose data-parallel ranks do not divide the prompts of a gradient step" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GPUS[:2], "--gpu-memory", "80"), "ConfigError: --gpu-memory: found '80'; expected"),
        ((*GPUS, "--host-memory", "much"), "ConfigError: --host-memory: found 'much'"),
        ((*GPUS, "--set", "model.load=elsewhere"), "ConfigError: model.load: found elsewhere"),
        ((*GPUS, "--set", "parallel.tensr=2"), "Did you mean parallel.tensor?"),
        ((*GPUS, "--set", "sglang.tp_size=0"), "ConfigError: sglang.tp_size: found 0"),
        (
            (*GPUS, "--set", "megatron.recompute_granularity=some"),
            "ConfigError: megatron.recompute_granularity",
        ),
        ((*GPUS, "--set", "megatron.recompute_modules=moe"), "ConfigError: megatron.recompute_modules"),
        (
            (*GPUS, "--set", "megatron.num_layers_in_first_pipeline_stage=x"),
            "ConfigError: megatron.num_layers_in",
        ),
        (("--gpu-memory", "80GB"), "--gpus"),
        (("--gpus", "0", "--gpu-memory", "80GB"), "--gpus"),
        ((*GPUS, "--recompute", "most"), "--recompute"),
        ((*GPUS, "--loss-from", "fused"), "--loss-from"),
    ],
)
def test_bad_input_is_refused_with_2_and_no_traceback(
    base: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = _plan(base, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_model_that_is_not_known_is_refused(base: Path) -> None:
    Path("model/config.json").write_text(json.dumps(QWEN3_30B | {"architectures": ["GPT2LMHeadModel"]}))
    result = _plan(base, *GPUS)
    assert result.exit_code == 2
    assert "found GPT2LMHeadModel" in result.stderr


def test_help_teaches_with_an_example() -> None:
    result = _plan("--help")
    assert "megatron-dppo plan base.toml --gpus 8 --gpu-memory 80GB" in result.stdout
    assert "Exits" in result.stdout
