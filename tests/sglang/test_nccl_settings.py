"""NCCL's settings of the trainer are what SGLang's own start-up leaves in a server's environment."""

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.engines.sglang.options import CUMEM, NVLS, nccl_settings
from megatron_dppo.engines.sglang.records import read_records
from tests.support.ranks import run_ranks
from tests.support.serving import PYTHON, Served, served_config
from tests.support.sync_job import push_once

START_UP = f"""
import json, os, sys
from types import SimpleNamespace
from sglang.srt.entrypoints.engine import _set_envs_and_config
unset = dict(nnodes=1, dcp_size=1, enable_symm_mem=False, enable_nccl_nvls=False, enable_metrics=False,
             custom_sigquit_handler=None, gc_threshold=None, enable_kv_cache_sharding=False,
             enable_memory_saver=False)
found = []
for table, exported in json.loads(sys.argv[1]):
    for name in {(CUMEM, NVLS)}:
        os.environ.pop(name, None)
    os.environ.update(exported)
    _set_envs_and_config(SimpleNamespace(**unset | table))
    found.append({{name: os.environ[name] for name in {(CUMEM, NVLS)}}})
print(json.dumps(found))
"""
CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({}, {CUMEM: "1", NVLS: "1"}),
    ({"enable_nccl_nvls": True}, {CUMEM: "1", NVLS: "0"}),
    ({"enable_symm_mem": True}, {CUMEM: "0"}),
]


def test_nccl_settings_equal_sglangs_start_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [str(PYTHON), "-W", "ignore", "-c", START_UP, json.dumps(CASES)]
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    for (table, exported), found in zip(CASES, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        for name in (CUMEM, NVLS):
            monkeypatch.delenv(name, raising=False)
        for name, value in exported.items():
            monkeypatch.setenv(name, value)
        assert nccl_settings(served_config(served.folder, served.run, **table)) == found


def test_server_processes_have_the_recorded_nccl_settings(served: Served) -> None:
    (record,) = (record for record in read_records(served.run / "servers") if record.name == "shared")
    assert record.nccl == {CUMEM: "0", NVLS: "0"}
    processes = [psutil.Process(record.pid), *psutil.Process(record.pid).children(recursive=True)]
    environments = [process.environ() for process in processes]
    # SGLang overwrites the environments of some processes with their titles.
    readable = [names for names in environments if "PATH" in names]
    assert readable
    assert all({name: names[name] for name in (CUMEM, NVLS)} == record.nccl for names in readable)


def test_a_server_with_others_is_sent_nothing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUMEM, "1")
    settings = served_config(served.folder, served.run).model_dump(mode="json", exclude_none=True)
    with pytest.raises(AssertionError, match=r"CUMEM_ENABLE=0 .* 1 "):
        run_ranks(push_once, 1, tmp_path, settings, 71)
