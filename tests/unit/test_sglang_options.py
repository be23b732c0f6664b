"""SGLang's environment: its packages, an environment for CPUs that is refused, and NCCL's settings."""

import functools
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang import options, server
from megatron_dppo.engines.sglang.options import (
    CUMEM,
    NVLS,
    environment_problems,
    installed_nccl,
    nccl_settings,
)
from megatron_dppo.engines.sglang.records import API_KEY, NCCL, TORCH, ServerRecord, differences
from megatron_dppo.engines.weight_sync.factory import run_servers
from megatron_dppo.errors import ConfigError
from megatron_dppo.run.session import join_processes
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.runtime.libraries import nccl_version
from megatron_dppo.runtime.process import Runtime

ROOT = Path(__file__).parents[2]


def make(folder: Path, *programs: str, variables: tuple[str, ...] = (), status: int = 0) -> str:
    """Of `make --dry-run sglang-venv`, into another folder, where only some programs succeed."""
    for name in ("nvidia-smi", "sbatch"):
        (folder / name).unlink(missing_ok=True)
        if name == "nvidia-smi" or name in programs:
            (folder / name).write_text(f"#!/bin/sh\nexit {int(name not in programs)}\n")
            (folder / name).chmod(0o755)
    flags = ["--dry-run"] if status == 0 else []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    environment["PATH"] = f"{folder}:/usr/bin:/bin"
    command = ["make", *flags, "sglang-venv", f"SGLANG_VENV={folder / 'venv'}", *variables]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert bool(done.returncode) == bool(status), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_environment_follows_the_user_or_the_gpu_and_has_a_stamp(tmp_path: Path) -> None:
    output = make(tmp_path, "nvidia-smi")
    assert "is for gpu: nvidia-smi says so" in output and f"touch {tmp_path}/venv/.stamp-gpu" in output
    output = make(tmp_path, "sbatch", "nvidia-smi", variables=("SGLANG_FOR=cpu",))
    assert "is for cpu: it was asked for" in output and f"touch {tmp_path}/venv/.stamp-cpu" in output
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".stamp-cpu").touch()
    assert "pip install" in make(tmp_path, "sbatch", variables=("SGLANG_FOR=gpu",))


@pytest.mark.parametrize(("version", "nccl"), [("0.5.22", "2.30.7"), ("0.5.23", "2.30.7")])
@pytest.mark.parametrize("is_for_gpu", [True, False])
def test_a_trainer_s_torch_for_gpus_gets_the_nccl_of_the_servers(
    tmp_path: Path, version: str, nccl: str, is_for_gpu: bool
) -> None:
    """Of `make sglang-venv` with servers that are there already; `make venv` does the same at its end."""
    python, log = tmp_path / "trainer/bin/python", tmp_path / "log"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\necho "$*" >>{log}\ncase "$*" in *" show "*) exit {int(not is_for_gpu)};; esac\n'
    )
    python.chmod(0o755)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/.stamp-gpu").touch()
    folders = (f"VENV={tmp_path / 'trainer'}", f"SGLANG_VENV={tmp_path / 'venv'}")
    command = ["make", *folders, f"SGLANG={version}"]
    run = functools.partial(subprocess.run, cwd=ROOT, check=True, capture_output=True, text=True)
    run([*command, "sglang-venv", "SGLANG_FOR=gpu"])
    _, *installs = log.read_text().splitlines()
    wanted = f"-m pip install --quiet --no-deps nvidia-nccl-cu13=={nccl}"
    assert installs == [wanted] * is_for_gpu
    listed = run([*command, "--dry-run", "venv"]).stdout
    assert "pip install" in listed and "nvidia-nccl" in listed.splitlines()[-2]


@pytest.mark.parametrize(
    ("variables", "words"),
    [((), "found sbatch and no GPU: a login node?"), (("SGLANG_FOR=tpu",), "found tpu; expected gpu or cpu")],
)
def test_a_login_node_needs_the_kind(tmp_path: Path, variables: tuple[str, ...], words: str) -> None:
    output = make(tmp_path, "sbatch", variables=variables, status=2)
    assert words in output
    assert not (tmp_path / "venv").exists()


def test_a_server_for_gpus_refuses_an_environment_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "sglang_on_cpu.pth").touch()
    monkeypatch.setattr(server, "read_options", lambda python: {})
    table = {"python": str(tmp_path / "bin" / "python")}
    with pytest.raises(ConfigError, match="make sglang-venv SGLANG_FOR=gpu"):
        server.plan_launch(Config.model_validate({"sglang": table}))
    table |= {"device": "cpu", "host": "0.0.0.0", "api_key": "in a file"}
    monkeypatch.delenv(API_KEY, raising=False)
    with pytest.raises(ConfigError) as on_cpu:
        server.plan_launch(Config.model_validate({"sglang": table}))
    assert {problem.where for problem in on_cpu.value.problems} >= {"sglang.api_key", "sglang.host"}
    assert "for CPUs" not in str(on_cpu.value) and "in a file" not in str(on_cpu.value)


def config_of(table: dict[str, Any], **options: Any) -> Config:
    rollout = {"engine": "sglang", "sglang": {"weight_sync": "distributed"} | options}
    return Config.model_validate({"model": {"load": "model"}, "rollout": rollout, "sglang": table})


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CUMEM, NVLS):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("table", "exported", "expected"),
    [
        ({}, {}, {CUMEM: "0", NVLS: "0"}),
        ({}, {CUMEM: "1"}, {CUMEM: "1", NVLS: "0"}),
        ({"enable_nccl_nvls": True}, {}, {CUMEM: "0", NVLS: "1"}),
        ({"enable_nccl_nvls": True}, {CUMEM: "1", NVLS: "0"}, {CUMEM: "1", NVLS: "1"}),
        ({"enable_symm_mem": True}, {CUMEM: "0", NVLS: "0"}, {CUMEM: "1", NVLS: "1"}),
    ],
)
def test_the_settings_are_the_final_ones_of_sglang(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, Any], exported: dict[str, str], expected: dict[str, str]
) -> None:
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    assert nccl_settings(config_of(table)) == expected


@pytest.mark.parametrize("way", ["tensor", "disk"])
def test_nothing_is_set_if_no_weights_go_through_nccl(way: str) -> None:
    assert nccl_settings(config_of({}, weight_sync=way)) == {}


def test_a_session_sets_them_before_it_joins_the_job() -> None:
    with join_processes(config_of({})):
        assert {name: os.environ[name] for name in (CUMEM, NVLS)} == {CUMEM: "0", NVLS: "0"}


def test_another_version_of_nccl_is_a_difference() -> None:
    own = {CUMEM: "0", NVLS: "0"}
    assert differences(own, own | {NCCL: "2.30.7"}) is None, "a trainer on CPUs"
    assert differences(own | {NCCL: "2.29.7"}, own) is None, "a server on CPUs"
    found = differences(own | {NCCL: "2.29.7"}, own | {NCCL: "2.30.7", TORCH: "2.14.1"})
    assert found is not None and found.startswith(
        "NCCL=2.30.7 there and 2.29.7 in the trainer (torch 2.14.1); "
    )
    assert "nvidia-nccl-cu13==2.30.7" in found and "'disk'" in found


def test_an_interpreter_with_a_torch_for_cpus_has_no_nccl() -> None:
    assert installed_nccl(Path(sys.executable)) == {}, "of torch's build for CPUs"
    assert installed_nccl(Path("/nowhere/python")) == {}


def test_an_interpreter_that_does_not_reply_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    assert options._run(python, "", timeout_s=0.2) == []
    assert str(python) in caplog.text and "not checked" in caplog.text


class Library:
    """NCCL as ctypes loads it, whatever torch was compiled with."""

    def __init__(self, name: str, mode: int) -> None:
        assert name == "libnccl.so.2" and mode & os.RTLD_NOLOAD, "the one that torch has loaded"

    @staticmethod
    def ncclGetVersion(reference: Any) -> int:
        reference._obj.value = 23007
        return 0


def not_loaded(name: str, mode: int) -> None:
    raise OSError(name)


@pytest.mark.parametrize(("library", "version"), [(Library, "2.30.7"), (not_loaded, None)])
def test_the_version_is_read_from_the_loaded_library(
    monkeypatch: pytest.MonkeyPatch, library: Any, version: str | None
) -> None:
    monkeypatch.setattr("ctypes.CDLL", library)
    assert nccl_version() == version
    on_gpu = Runtime(torch.device("cuda", 0), rank=0, world_size=1)
    assert on_gpu.nccl_version == version


def test_a_server_with_another_nccl_than_the_trainer_s_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$4" in *nccl*) echo 2.30.7 2.14.1;; *) echo 0.5.23;; esac\n')
    python.chmod(0o755)
    monkeypatch.setattr(server, "read_options", lambda python: {})
    monkeypatch.setattr(options, "trainer_nccl", lambda: {NCCL: "2.29.7"})
    table = {"python": str(python)}
    with pytest.raises(
        ConfigError,
        match=r"NCCL 2\.29\.7 here and 2\.30\.7 in .* \(torch 2\.14\.1\).*--no-deps nvidia-nccl-cu13==2",
    ):
        server.plan_launch(config_of(table))
    with pytest.raises(ConfigError) as refusal:  # of the model's folder, which is missing
        server.plan_launch(config_of(table, weight_sync="disk"))
    assert "NCCL" not in str(refusal.value)


def test_a_push_leaves_out_a_registered_server_with_another_nccl(tmp_path: Path) -> None:
    """From the interpreter that serves, through the server's record, to the trainer's push."""
    python, run = tmp_path / "python", tmp_path / "run"
    python.write_text('#!/bin/sh\ncase "$4" in *nccl*) echo 2.30.7 2.14.1;; esac\n')
    python.chmod(0o755)
    config = config_of({})
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": run})})
    shared = nccl_settings(config) | dict(installed_nccl(python))
    assert shared[TORCH] == "2.14.1", "recorded"
    record = ServerRecord("s", "http://127.0.0.1:9", "h", 1, "0.5.23", "now", 1, shared)
    (run / "servers").mkdir(parents=True)
    write_jsonl(run / "servers" / "s.json", [asdict(record)])
    of_trainer = {"2.29.7": True, "2.30.7": False, None: False}
    for own, is_refused in of_trainer.items():
        trainer: Any = SimpleNamespace(nccl_version=own, on_main=lambda find: find())
        fleet, absent = run_servers(config, trainer).fleet()
        assert not fleet.members, "nothing listens at the URL"
        assert ("NCCL=2.30.7 there" in absent[record.url]) is is_refused


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_colocated_server_gets_no_expandable_segments(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    colocated, apart = config_of({}, colocated=True, weight_sync="tensor"), config_of({})
    refused = ("expandable_segments:True", "garbage_collection_threshold:0.8,Expandable_Segments: true")
    for value in (*refused, "expandable_segments:False", "max_split_size_mb:64", "backend:cudaMallocAsync"):
        monkeypatch.setenv(name, value)
        assert [name in str(each) for each in environment_problems(colocated)] == [True] * (value in refused)
        assert not list(environment_problems(apart))
    monkeypatch.setenv(name, refused[1])
    monkeypatch.setattr(server, "read_options", lambda python: {})
    monkeypatch.setattr(server, "is_for_cpu", lambda python: False)
    with pytest.raises(ConfigError, match=name):
        server.plan_launch(colocated)


def test_differences_name_both_sides() -> None:
    own = {CUMEM: "1", NVLS: "0"}
    assert differences(own, own) is None
    assert differences(own, {}) is None, "a server of an older version, which registered none"
    assert differences({}, own) is None, "no weights go through NCCL"
    assert differences(own, {CUMEM: "0", NVLS: "0"}) == (
        "NCCL_CUMEM_ENABLE=0 there and 1 in the trainer; export the same values on every node"
    )
