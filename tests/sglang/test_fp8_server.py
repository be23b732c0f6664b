"""A server of 8-bit floats with block scales gets pushes in place, and samples near the trainer.

The CPU multiplies dequantised weights (`cpu_shim/`): log-probs are compared without the kernels of a GPU, and
without the rounding of inputs.
"""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.errors import ConfigError
from tests.sglang.test_mismatch import run_tool
from tests.support.ranks import run_ranks
from tests.support.serving import LAYERS, MAX_TOKENS, OPTIONS, ROOT, START_TIMEOUT_S
from tests.support.sync_job import WAYS, push_quantised
from tests.support.tiny import write_model

SIZES: dict[str, Any] = {
    "hidden_size": 192,  # a block and a half
    "num_attention_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.05,
}


def invoke(*arguments: object) -> None:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output + repr(done.exception)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that trains the original, and serves it in the form of the quantised folder of another seed."""
    folder = tmp_path_factory.mktemp("fp8")
    model, other = (write_model(folder / name, seed, **SIZES) for seed, name in enumerate(("model", "other")))
    runpy.run_path(str(ROOT / "examples/quickstart/make_model.py"))["make_tokenizer"]().save_pretrained(model)
    flags = ["--format", "fp8_block", "--exclude", "*.layers.1.self_attn.o_proj", "--no-measure"]
    invoke("quantize", "--hf", other, "--out", folder / "fp8", *flags)
    sanity_task.write_prompts(folder / "prompts.jsonl", 32, 0)
    return {
        "run": {"folder": str(folder / "run")},
        "model": {"load": str(model), "dtype": "float32"},
        "parallel": {"max_tokens_per_microbatch": 80},
        "data": {"prompts": str(folder / "prompts.jsonl"), "reward": "arithmetic", "max_prompt_tokens": 16},
        "rollout": {
            "engine": "sglang",
            "prompts_per_rollout": 4,
            "samples_per_prompt": 3,
            "max_response_tokens": 24,
            "routing_replay": "measure",
        },
        "sglang": OPTIONS | {"model_path": str(folder / "fp8")},
    }


@pytest.fixture(scope="module")
def server(tables: dict[str, Any]) -> Iterator[Server]:
    config = Config.model_validate(tables)
    server = Server(plan_launch(config), config.run.folder / "servers", "fp8")
    try:
        assert server.start(START_TIMEOUT_S) is not None
        yield server
    finally:
        server.stop(grace_s=0)


def test_mismatch_has_the_size_of_8_bit_rounding(
    tables: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    """The command pushes: the server's folder has other weights, and only its form is used."""
    done = run_tool(tmp_path, tables, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "mismatch.json").read_text())
    assert found["serves_these_weights"] and found["num_responses"] == 12
    assert 1e-4 < found["live"]["log_prob_diff_mean"] < 0.2


@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["one process", "pipeline 2"])
def test_every_way_serves_the_quantised_weights(
    tables: dict[str, Any], server: Server, tmp_path: Path, parallel: dict[str, int]
) -> None:
    first = 10 * (1 + len(parallel))
    settings = tables | {"parallel": tables["parallel"] | parallel}
    results = run_ranks(push_quantised, 1 + len(parallel), tmp_path, settings, first)
    for way in WAYS:
        print(way, results[0][way])
        assert results[0][way]["from_dequantised"] <= 1e-4
        assert 1e-4 < results[0][way]["metrics"]["sync/probe_abs_diff_mean"] < 0.2


def test_a_server_that_quantises_by_itself_is_not_started(tables: dict[str, Any]) -> None:
    plain = {name: value for name, value in tables["sglang"].items() if name != "model_path"}
    with pytest.raises(ConfigError) as error:
        plan_launch(Config.model_validate(tables | {"sglang": plain | {"quantization": "fp8"}}))
    assert [problem.where for problem in error.value.problems] == ["sglang.quantization"]
