"""Errors name the resource that a machine lacks, and requests are bounded by what it has."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.agents import harness
from megatron_dppo.architectures.sizes import _LARGEST, TEXT_MODELS, read_model_config
from megatron_dppo.engines.sglang.dispatch import LoadBalancer
from megatron_dppo.errors import ConfigError
from megatron_dppo.run.preemption import EXIT_CODE, Preempted, StopRequests
from megatron_dppo.runtime.process import host_bytes, num_files_left

ASK_MANY = """
import resource, sys
from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.engine import SglangEngine
from tests.support.sglang_stand_in import MODEL, LiveStandIn

num_files, num_requests = map(int, sys.argv[1:])
with LiveStandIn(token_s=0.002).running() as first, LiveStandIn(token_s=0.002).running() as second:
    engine = SglangEngine([first.url, second.url], MODEL, max_concurrent_requests=256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files // 2, num_files))
    requests = [Request(f"g{n}+0", (1, 2, 3), (1, 0, n)) for n in range(num_requests)]
    found = engine.generate(requests, SamplingParams(8))
    num_lost = [each.finish_reason for each in found].count("abort")
    print(num_lost, engine.counts.num_requeued, dict(engine.refusals))
"""


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a separate process."""
    command = (sys.executable, "-c", code, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.parametrize(("num_files", "num_requests"), [(180, 150), (320, 300)])
def test_more_requests_than_open_files_drain_no_server_and_lose_nothing(
    num_files: int, num_requests: int
) -> None:
    """The servers are in this process too, so each request in flight takes three files or four."""
    command = (sys.executable, "-c", ASK_MANY, str(2 * num_files), str(num_requests))
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.stdout.strip() == "0 0 {}", done.stderr[-3000:]


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    code = (
        "import resource; from megatron_dppo.runtime.process import num_files_left\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, 400)); before = num_files_left()\n"
        "files = [open('/dev/null') for _ in range(300)]\n"
        "print(before, num_files_left(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, timeout=1200, check=True
    )
    before, after, soft, hard = map(int, done.stdout.split())
    assert before - after == 300 and 300 < before < 400 and (soft, hard) == (400, 400)
    assert num_files_left() > 0 and host_bytes() > 1 << 30


@pytest.mark.parametrize(
    ("num_files", "memory", "processes", "expected"),
    [
        (100_256, 1 << 40, "1", 4096),  # half of 1 TiB, 128 MiB each
        (100_256, 1 << 40, "8", 512),
        (4_256, 1 << 40, "1", 1000),
        (200, 1 << 40, "1", 1),
        (100_256, 1 << 27, "4", 1),
    ],
)
def test_open_episodes_are_bounded_by_files_and_memory(
    num_files: int, memory: int, processes: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "num_files_left", lambda: num_files)
    monkeypatch.setattr(harness, "host_bytes", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert harness.most_open_episodes() == expected


@pytest.mark.parametrize("num_files", [90, 250])
def test_a_process_that_may_open_few_files_is_refused_before_it_joins(num_files: int) -> None:
    code = (
        "import resource, megatron_dppo.runtime.process as process\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({num_files}, {num_files})); process.start()"
    )
    said = python(code).stderr.splitlines()[-1]
    assert said.startswith("megatron_dppo.errors.ShortageError: this machine: found that a process may open")
    assert "Raise the limit (ulimit -n)" in said


@pytest.mark.parametrize(("num_connections", "expected"), [(100, 8), (21, 7), (7, 2), (2, 1), (0, 1)])
def test_servers_share_the_connections(num_connections: int, expected: int) -> None:
    balancer = LoadBalancer(["a", "b", "c"], 8)
    balancer.limit(num_connections)
    taken = [balancer.take(f"g{n}") for n in range(30)]
    assert {url: taken.count(url) for url in ("a", "b", "c")} == dict.fromkeys("abc", expected)


def config_with(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    content = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize("name", _LARGEST)
def test_a_size_that_no_model_has_is_refused_before_anything_is_built_of_it(name: str, tmp_path: Path) -> None:
    most = _LARGEST[name]
    assert read_model_config(config_with(tmp_path / "a", **{name: most}))[1][name] == most
    for number, size in enumerate((most + 1, 10**12)):
        with pytest.raises(ConfigError, match=rf"config\.json: {name} = {size}.*at most {most}"):
            read_model_config(config_with(tmp_path / f"b{number}", **{name: size}))
    of_vision = {"architectures": [next(iter(TEXT_MODELS))], "text_config": {name: most + 1}}
    with pytest.raises(ConfigError, match=f"{name} = {most + 1}"):
        read_model_config(config_with(tmp_path / "c", **of_vision))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_that_has_nothing_to_save_at_once(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopRequests(has_begun=False).handle_signals() as requests:
        with pytest.raises(Preempted) as ended:
            os.kill(os.getpid(), number)
        assert ended.value.code == EXIT_CODE
    assert f"exit {EXIT_CODE} before training has begun" in capfd.readouterr().err
    with StopRequests(has_begun=False).handle_signals() as requests:
        requests.begin()
        os.kill(os.getpid(), number)
        assert requests.is_received
    assert "saving, then exit" in capfd.readouterr().err


@pytest.mark.parametrize(("option", "status"), [("-O", 0), ("-OO", 1)])
def test_python_without_docstrings_is_refused_with_what_to_do(option: str, status: int) -> None:
    command = (sys.executable, option, "-m", "megatron_dppo", "--version")
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == status and ("Unset PYTHONOPTIMIZE" in done.stderr) == bool(status)
