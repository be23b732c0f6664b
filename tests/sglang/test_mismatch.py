"""`megatron-dppo measure-mismatch` against the real server: in float32 engine and trainer agree."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from megatron_dppo.data.prompts import sanity_task
from tests.support.converting import converted
from tests.support.mismatch_ranks import LAYOUTS, measure_layouts, require_parity
from tests.support.ranks import run_ranks
from tests.support.records import lines_of
from tests.support.serving import LAYERS, MAX_TOKENS, OPTIONS, ROOT, Served, write_served_model
from tests.support.tiny import write_model
from tools.benchmarks.benchmarking import torchrun

PROMPTS, SAMPLES = 6, 3


@pytest.fixture(scope="module")
def tables(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of the server that is there. Its folder gets a tokenizer, which servers do not read."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    sanity_task.write_prompts(prompts, 32, 0)
    _write_tokenizer(served.folder)
    return {
        "run": {"folder": str(served.run)},
        "model": {"load": str(served.folder), "dtype": "float32"},
        "parallel": {"max_tokens_per_microbatch": 80},
        "data": {"prompts": str(prompts), "reward": "arithmetic", "max_prompt_tokens": 16},
        "rollout": {
            "engine": "sglang",
            "prompts_per_rollout": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": 24,
            "num_topk_log_probs": 20,
        },
        "sglang": OPTIONS,
    }


def _write_tokenizer(folder: Path) -> None:
    make_model = runpy.run_path(str(ROOT / "examples" / "quickstart" / "make_model.py"))
    make_model["make_tokenizer"]().save_pretrained(folder)


@pytest.mark.parametrize("world_size", sorted(LAYOUTS))
def test_server_and_trainer_agree_in_every_layout(
    tables: dict[str, Any], tmp_path: Path, world_size: int
) -> None:
    layouts = {name: layout for name, layout in LAYOUTS[world_size].items() if "pipeline" not in layout}
    results = run_ranks(measure_layouts, world_size, tmp_path, tables, str(tmp_path), layouts)
    require_parity(results, Path(tables["model"]["load"]), LAYERS, PROMPTS * SAMPLES)
    for name, found in results[0].items():
        values = found["statistics"]["live"]
        print(f"{name}: log-probs {values['log_prob_diff_max']:.1e}, top-20 TV {values['topk_tv_max']:.1e}")
        assert found["counts"].num_dropped_samples == 0


def run_tool(folder: Path, tables: dict[str, Any], *arguments: str, processes: int = 1) -> Any:
    toml = folder / "base.toml"
    toml.write_text(tomli_w.dumps(tables))
    launcher = torchrun(sys.executable, processes) if processes > 1 else [sys.executable]
    command = [*launcher, "-m", "megatron_dppo", "measure-mismatch", str(toml), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)


def test_a_server_is_there_for_the_time_of_the_measurement(tables: dict[str, Any], tmp_path: Path) -> None:
    """It gets the weights of a converted folder from two pipeline stages, and the output layer it builds."""
    sizes = {"max_position_embeddings": MAX_TOKENS, "num_hidden_layers": 2, "tie_word_embeddings": True}
    model = write_model(tmp_path / "model", **sizes)
    _write_tokenizer(model)
    megatron = tmp_path / "megatron"
    converted("to-megatron", "--hf", model, "--out", megatron)
    flags = ["--serve", "--prompts", "2", "--set", f"model.load={megatron}", "--set", "parallel.pipeline=2"]
    done = run_tool(tmp_path, tables, *flags, "-o", str(tmp_path / "out"), processes=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "mismatch.json").read_text())
    rows = lines_of(tmp_path / "out" / "tokens.jsonl")
    require_parity([{"PP2": {"statistics": found, "rows": rows}}], model, LAYERS, 2 * SAMPLES)
    assert found["num_responses"] == 2 * SAMPLES
    assert found["serves_these_weights"]
    assert list((tmp_path / "out" / "servers").iterdir()) == [tmp_path / "out" / "servers" / "own-0.log"]
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]


def test_a_server_of_another_model_is_refused(tables: dict[str, Any], tmp_path: Path) -> None:
    other = write_served_model(tmp_path / "other")
    _write_tokenizer(other)
    done = run_tool(tmp_path, tables, "--set", f"model.load={other}", "-o", str(tmp_path / "out"))
    assert done.returncode == 2, done.stderr
    assert f"expected model.load, {other}" in done.stderr
    assert "layers of the" not in done.stderr  # no model was loaded
