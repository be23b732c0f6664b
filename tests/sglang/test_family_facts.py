"""What families say of SGLang, compared with the SGLang that is installed."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served_families import served_tables, write_served_case
from serving import KEY, PYTHON, START_TIMEOUT_S
from tiny_families import config_of

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.config.schema import Config
from megatron_dppo.rollout.sglang.options import installed_version
from megatron_dppo.rollout.sglang.server import Server, plan_launch

SHARED = [name for name, family in FAMILIES.items() if family.sglang.arguments]
LACKING = [name for name, family in FAMILIES.items() if family.sglang.lacks_routes]
READ_KEYS = """
import json, sys
from transformers import AutoConfig
for folder, keys in json.loads(sys.argv[1]).items():
    config = AutoConfig.from_pretrained(folder)
    print(json.dumps({key: getattr(config, key, None) for key in keys}))
"""


def test_sglang_s_transformers_has_no_defaults_for_the_keys_that_config_json_must_have(tmp_path: Path) -> None:
    """Of a config.json as transformers saves it; with the keys, they arrive."""
    asked: dict[str, list[str]] = {}
    expected: list[Mapping[str, Any]] = []
    for name, family in FAMILIES.items():
        keys = family.sglang.config_keys
        for with_keys in (False, True) if keys else ():
            folder = tmp_path / f"{name} {with_keys}"
            config_of(name, architectures=[name]).save_pretrained(folder)
            if with_keys:
                file = folder / "config.json"
                file.write_text(json.dumps(json.loads(file.read_text()) | dict(keys)))
            asked[str(folder)] = list(keys)
            expected.append(keys if with_keys else dict.fromkeys(keys))
    command = [PYTHON, "-c", READ_KEYS, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


@pytest.mark.parametrize("name", SHARED)
def test_shared_experts_stay_apart_unless_the_config_says_otherwise(name: str, tmp_path: Path) -> None:
    write_served_case(tmp_path, name)
    tables, flag = served_tables(tmp_path, name), "--disable-shared-experts-fusion"
    assert flag in plan_launch(Config.model_validate(tables)).command
    own = tables | {"sglang": tables["sglang"] | {"disable_shared_experts_fusion": False}}
    assert flag not in plan_launch(Config.model_validate(own)).command


@pytest.mark.slow
@pytest.mark.parametrize("name", LACKING)
def test_a_server_that_cannot_return_routes_ends_at_the_first_request(name: str, tmp_path: Path) -> None:
    write_served_case(tmp_path, name)
    tables = served_tables(tmp_path, name)
    launch = plan_launch(Config.model_validate(tables))
    launch = replace(launch, command=(*launch.command, "--enable-return-routed-experts"))
    server = Server(launch, tmp_path / "servers", "own")
    body = {"input_ids": [5, 6, 7], "return_routed_experts": True, "sampling_params": {"max_new_tokens": 2}}
    try:
        assert server.start(START_TIMEOUT_S) is not None
        headers, url = {"Authorization": f"Bearer {KEY}"}, f"{launch.url}/generate"
        if installed_version(PYTHON) in FAMILIES[name].sglang.lacks_routes:
            with pytest.raises(httpx2.HTTPError):
                httpx2.post(url, json=body, headers=headers, timeout=60).raise_for_status()
        else:
            assert (
                "routed_experts" in httpx2.post(url, json=body, headers=headers, timeout=60).json()["meta_info"]
            )
    finally:
        server.stop(grace_s=0)
