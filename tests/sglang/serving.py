"""A tiny model, and what a server that serves it on a CPU is started with."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import EXPERTS, LAYERS, TOP_K, VOCAB, write_model
from transformers import Qwen3MoeForCausalLM

from megatron_dppo.rollout.sglang.protocol import ServedModel
from megatron_dppo.types import ModelRouting

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
MAX_TOKENS = 512
START_TIMEOUT_S = 600.0
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "enable_return_routed_experts": True,
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "context_length": MAX_TOKENS,
    "weight_version": "0",
}
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers at once, and generates nothing
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
MODEL = ServedModel(VOCAB, LAYERS, end_tokens=(0,), routing=ModelRouting(tuple(range(LAYERS)), EXPERTS, TOP_K))


@dataclass(frozen=True)
class Served:
    """A server that answers, and what it serves."""

    url: str
    folder: Path
    model: Qwen3MoeForCausalLM  # the same weights, here


def write_served_model(folder: Path) -> Path:
    """A Qwen3-MoE without dense layers, which SGLang would serve as sparse ones."""
    return write_model(folder, max_position_embeddings=MAX_TOKENS)


def command_line(model: Path, port: int) -> list[str]:
    """Starts a server on the loopback interface, with `OPTIONS`."""
    command = [str(PYTHON), "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in OPTIONS.items():
        command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return command


def environment() -> dict[str, str]:
    """This process's own, without what points at our packages."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | ENVIRONMENT


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
