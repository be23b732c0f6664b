"""A tiny model, and what a server that serves it on a CPU is started with."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.client import SglangClient
from megatron_dppo.engines.sglang.options import installed_version
from megatron_dppo.engines.sglang.protocol import ServedModel
from megatron_dppo.engines.sglang.records import ServerRecord
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.types import ModelRouting
from tests.support.tiny import EXPERTS, TOP_K, VOCAB, write_model

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SERVERS_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
VERSION = str(installed_version(PYTHON))
LAYERS = 2  # one for each pipeline stage
MAX_TOKENS = 512
CHUNK = 32  # tokens of prompts computed at a time: most prompts take several
START_TIMEOUT_S = 600.0
OPTIONS: dict[str, Any] = {
    "python": str(PYTHON),
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "dtype": "float32",
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "context_length": MAX_TOKENS,
    "chunked_prefill_size": CHUNK,
}
TIGHT: dict[str, Any] = {"max_total_tokens": MAX_TOKENS, "schedule_conservativeness": 0.05}
"""Options of a server that admits more than its cache holds, and so retracts."""
KEY = "a key of the tests"
MODEL = ServedModel(VOCAB, LAYERS, end_tokens=(0,), routing=ModelRouting(tuple(range(LAYERS)), EXPERTS, TOP_K))


@dataclass(frozen=True)
class Served:
    """A running server, and the model that it serves."""

    url: str
    folder: Path
    model: Any  # transformers', with the same weights
    run: Path  # the run's folder, whose servers/ names the server


@contextmanager
def server_of(folder: Path, run: Path, name: str) -> Iterator[tuple[Server, ServerRecord]]:
    """A server of a model, until the block ends; it may end before."""
    server = Server(plan_launch(served_config(folder, run)), run / "servers", name)
    try:
        record = server.start(START_TIMEOUT_S)
        assert record is not None
        yield server, record
    finally:
        server.stop(grace_s=0)


def num_requests(served: Served) -> int:
    """Requests that are at the server, by what it reports."""
    return num_requests_at(served.url)


def num_requests_at(url: str) -> int:
    """Requests that are at the server of a URL, by what it reports."""

    async def ask() -> int:
        async with SglangClient(url, api_key=KEY) as client:
            generation, _ = await client.connect()
            return generation.read_load(await client.loads())

    return asyncio.run(ask())


def write_served_model(folder: Path) -> Path:
    """A Qwen3-MoE without dense layers, which SGLang would serve as sparse ones."""
    return write_model(folder, num_hidden_layers=LAYERS, max_position_embeddings=MAX_TOKENS)


def served_config(model: Path, run: Path, **options: Any) -> Config:
    """A run that has its rollouts from a server on this machine's CPU."""
    return Config.model_validate(
        {
            "run": {"folder": run},
            "model": {"load": model, "dtype": "float32"},
            "rollout": {"engine": "sglang", "routing_replay": "measure"},
            "sglang": OPTIONS | options,
        }
    )
