"""NCCL's settings: equal in trainer and servers, from one function of the config and the environment."""

import os
from typing import Any

import pytest

from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.nccl import CUMEM, NVLS, differences, nccl_settings
from megatron_dppo.run.session import join_processes


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
def test_the_settings_are_those_that_sglang_ends_with(
    monkeypatch: pytest.MonkeyPatch, table: dict[str, Any], exported: dict[str, str], expected: dict[str, str]
) -> None:
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    assert nccl_settings(config_of(table)) == expected


@pytest.mark.parametrize("way", ["tensor", "disk"])
def test_nothing_is_set_where_no_weights_go_through_nccl(way: str) -> None:
    assert nccl_settings(config_of({}, weight_sync=way)) == {}


def test_a_session_sets_them_before_it_joins_the_job() -> None:
    with join_processes(config_of({})):
        assert {name: os.environ[name] for name in (CUMEM, NVLS)} == {CUMEM: "0", NVLS: "0"}


def test_differences_name_both_sides() -> None:
    own = {CUMEM: "1", NVLS: "0"}
    assert differences(own, own) is None
    assert differences(own, {}) is None, "a server of an older version, which registered none"
    assert differences({}, own) is None, "no weights go through NCCL"
    assert differences(own, {CUMEM: "0", NVLS: "0"}) == (
        "NCCL_CUMEM_ENABLE=0 there and 1 in the trainer; export the same values on every node"
    )
