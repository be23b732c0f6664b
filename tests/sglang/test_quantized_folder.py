"""Folders of `megatron-dppo quantize`, as SGLang's own code takes them; its kernels for them need a GPU."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.runtime.files import write_jsonl
from tests.support.serving import PYTHON
from tests.support.tiny_families import write_family
from tests.support.word_tokenizers import TOKENIZER

SCRIPT = Path(__file__).with_name("quantized_reading.py")
GATES, EXPERTS = ["model.layers.0.mlp.gate"], ["model.layers.1.mlp.experts"]


def quantize(*arguments: object) -> None:
    done = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    assert done.exit_code == 0, done.output + repr(done.exception)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """FP8, and NVFP4 without the experts of one layer."""
    folder = tmp_path_factory.mktemp("quantized")
    model = write_family(folder / "model", "Qwen3MoeForCausalLM", torch.bfloat16, num_hidden_layers=2)
    TOKENIZER.save_pretrained(model)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": "<bos> 2 1 * 4 3 =", "answer": "903"}])
    given = ["--hf", model, "--prompts", folder / "prompts.jsonl", "--no-measure"]
    quantize(*given, "--out", folder / "fp8", "--format", "fp8")
    quantize(*given, "--out", folder / "nvfp4", "--format", "nvfp4", "--exclude", "*.layers.1.mlp.*")
    return [folder / "fp8", folder / "nvfp4"]


def test_sglang_finds_the_format_the_exclusions_and_the_tensors_it_wants(folders: list[Path]) -> None:
    command = [str(PYTHON), str(SCRIPT), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    fp8, nvfp4 = json.loads(done.stdout.splitlines()[-1])
    assert (fp8["quantization"], nvfp4["quantization"]) == ("modelopt_fp8", "modelopt_fp4")
    assert fp8["excluded"] == [*GATES, "lm_head"]
    assert nvfp4["excluded"] == [*GATES, *EXPERTS, "lm_head"]
    for folder, found in zip(folders, (fp8, nvfp4), strict=True):
        assert {name: tuple(value) for name, value in found["wanted"].items()} == stored(folder)


def stored(folder: Path) -> dict[str, tuple[str, int]]:
    """Type and size of what the files hold of one linear."""
    prefix = "model.layers.0.self_attn.o_proj."
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    return {
        name.removeprefix(prefix): (str(tensor.dtype), tensor.numel())
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
