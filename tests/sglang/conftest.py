"""One server for the whole session, and the model that it serves."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from megatron_dppo.engines.sglang.client import Call, SglangClient
from megatron_dppo.engines.sglang.records import API_KEY
from tests.support.serving import KEY, Served, server_of, write_served_model


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """One thread for each server, and a key that it asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(API_KEY, KEY)
        yield


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, environment: None) -> Iterator[Served]:
    """A real server; it and its children end with the session."""
    folder = write_served_model(tmp_path_factory.mktemp("served") / "model")
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    run = folder.parent / "run"
    with server_of(folder, run, "shared") as (_, record):
        yield Served(record.url, folder, model, run)


@pytest.fixture(scope="module")
def changes_weights(served: Served) -> Iterator[None]:
    """For modules that push to the shared server: it holds its own weights again when they are done."""
    yield
    original = Call("/update_weights_from_disk", {"model_path": str(served.folder), "weight_version": "0"})

    async def restore() -> None:
        async with SglangClient(served.url, api_key=KEY) as client:
            await client.command(original, timeout_s=300)

    asyncio.run(restore())
