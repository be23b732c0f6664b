"""`megatron-dppo serve`, started as a user would, and the life of its server."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience, SglangClient
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.options import (
    Option,
    arguments,
    option_problems,
    read_options,
    shipped_options,
)
from megatron_dppo.engines.sglang.records import read_records
from megatron_dppo.engines.sglang.server import Server, plan_launch
from megatron_dppo.errors import ConfigError, ServerError
from tests.support.converting import converted
from tests.support.leaks import readable_secrets, secrets_on_command_lines
from tests.support.processes import wait_until
from tests.support.serving import (
    KEY,
    MODEL,
    PYTHON,
    START_TIMEOUT_S,
    VERSION,
    Served,
    num_requests_at,
    served_config,
    write_served_model,
)


def _is_healthy(url: str) -> bool:
    async def ask() -> bool:
        async with SglangClient(url, api_key=KEY) as client:
            return await client.is_healthy()

    return asyncio.run(ask())


def _endless_requests() -> list[Request]:
    """Many for one server, none of which may end before the others began."""
    return [Request(f"r+{i}", (5 + i % 80, 6, 7), (0, 0, i)) for i in range(64)]


def test_the_shared_server_is_registered(served: Served) -> None:
    (record,) = read_records(served.run / "servers")
    assert (record.name, record.url, record.version, record.num_starts) == ("shared", served.url, VERSION, 1)
    os.kill(record.pid, 0)
    assert secrets_on_command_lines({"the key": KEY}) == []
    assert readable_secrets(served.run, {"the key": KEY, "its address": record.url}) == []


def test_a_killed_server_is_started_again_and_sigterm_ends_all(served: Served, tmp_path: Path) -> None:
    config = served_config(served.folder, tmp_path / "run")
    toml = tmp_path / "run.toml"
    toml.write_text(tomli_w.dumps(json.loads(config.model_dump_json(exclude_none=True))))
    with (tmp_path / "serve.log").open("wb") as log:
        serve = subprocess.Popen(
            [sys.executable, "-m", "megatron_dppo", "serve", str(toml), "--name", "one"], stderr=log, stdout=log
        )
    folder = tmp_path / "run" / "servers"
    try:
        wait_until(lambda: bool(read_records(folder)) or serve.poll() is not None, START_TIMEOUT_S)
        (first,) = read_records(folder)
        engine = SglangEngine(first.url, MODEL, Patience(first_pause_s=0.1), api_key=KEY)
        with ThreadPoolExecutor() as pool:
            sampling = pool.submit(engine.generate, _endless_requests(), SamplingParams(400))
            wait_until(lambda: num_requests_at(first.url) > 0, 300)
            os.kill(first.pid, signal.SIGKILL)
            with pytest.raises(ServerError, match=r"(?s)POST .*/generate: found .* Look at the server's log"):
                sampling.result(600)
        wait_until(lambda: not read_records(folder), 300)
        wait_until(lambda: bool(read_records(folder)) or serve.poll() is not None, START_TIMEOUT_S)
        (second,) = read_records(folder)
        assert (second.url, second.num_starts) == (first.url, 2)
        assert second.pid != first.pid
        assert _is_healthy(second.url)
        (completion,) = engine.generate(_endless_requests()[:1], SamplingParams(4))
        assert 1 <= completion.tokens.numel() <= 4
    finally:
        serve.send_signal(signal.SIGTERM)
        status = serve.wait(300)
    assert status == 0, (tmp_path / "serve.log").read_text()
    assert read_records(folder) == []
    assert not _is_healthy(second.url)
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(served: Served, tmp_path: Path) -> None:
    launch = plan_launch(served_config(served.folder, tmp_path, context_length=100_000))
    server = Server(launch, tmp_path / "servers", "broken")
    with pytest.raises(
        ServerError, match=r"(?s)it ended with status .*Fix the error in its log.*100000"
    ) as failure:
        server.start(START_TIMEOUT_S)
    assert KEY not in str(failure.value)
    assert read_records(tmp_path / "servers") == []


def sorted_choices(option: Option) -> Option:
    """SGLang makes some lists of choices from sets: their order changes from process to process."""
    return replace(option, choices=None if option.choices is None else sorted(option.choices))


def test_arguments_are_checked_by_the_installed_sglang(tmp_path: Path) -> None:
    options = read_options(PYTHON, tmp_path)
    assert options is not None
    assert list(tmp_path.glob(f"sglang-{VERSION}-arguments.json"))
    assert read_options(PYTHON, tmp_path) == options
    pairs = [
        {name: sorted_choices(o) for name, o in each.items()} for each in (shipped_options(VERSION), options)
    ]
    assert pairs[0] == pairs[1], "what check uses on a machine without SGLang"
    table = {
        "python": "x",
        "tp_sise": 2,
        "tp_size": "two",
        "sleep_on_idle": 1,
        "sampling_backend": "dice",
        "lora_paths": "x",
    }
    found = {problem.where: str(problem) for problem in option_problems(table, options)}
    assert found.keys() == {f"sglang.{name}" for name in table} - {"sglang.python"}
    for name, part in {
        "tp_sise": "Did you mean sglang.tp_size?",
        "tp_size": "expected a whole number",
        "sleep_on_idle": "expected true or false",
        "sampling_backend": "expected one of",
        "lora_paths": "expected a list",
    }.items():
        assert part in found[f"sglang.{name}"]


def test_a_table_becomes_a_command_line(tmp_path: Path) -> None:
    options = read_options(PYTHON, tmp_path)
    assert options is not None
    table = {
        "python": "x",
        "tp_size": 2,
        "sleep_on_idle": True,
        "disable_radix_cache": False,
        "lora_strict_loading": False,
        "json_model_override_args": {"a": 1},
    }
    line = [
        "--tp-size",
        "2",
        "--sleep-on-idle",
        "--no-lora-strict-loading",
        "--json-model-override-args",
        '{"a": 1}',
    ]
    assert arguments(table, options) == line


def test_a_converted_folder_is_served_without_weights_until_a_push(tmp_path: Path) -> None:
    """And a Hugging Face folder with its own, as version 0."""
    model = write_served_model(tmp_path / "model")
    converted("to-megatron", "--hf", model, "--out", tmp_path / "megatron")
    expected = {"model": (model, "0", None), "megatron": (tmp_path / "megatron" / "hf", "-1", "dummy")}
    for name, (served, version, load_format) in expected.items():
        line = plan_launch(served_config(tmp_path / name, tmp_path / "run")).command
        given = dict(itertools.pairwise(line))
        assert given["--model-path"] == str(served)
        assert (given["--weight-version"], given.get("--load-format")) == (version, load_format)


def test_unlaunchable_configs_are_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make sglang-venv"):
        plan_launch(served_config(served.folder, tmp_path, python=sys.executable))
    with pytest.raises(ConfigError, match=r"\(config\.json\)"):
        plan_launch(served_config(tmp_path, tmp_path))
    with pytest.raises(ConfigError, match=r"\[sglang\]"):
        plan_launch(served_config(served.folder, tmp_path, weight_version="7"))
