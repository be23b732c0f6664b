"""Pushes that go wrong: servers killed or stopped in the middle, and a trainer that died there."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.engines.sglang.records import ServerRecord
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks
from tests.support.serving import Served, num_requests, served_config, server_of
from tests.support.sync_job import die_in_the_middle, die_while_sampling, lose_a_server, push_once

DROPPED, DROPPED_WITHIN_S = b"Request is disconnected from the client side", 300.0

pytestmark = pytest.mark.usefixtures("changes_weights")


@pytest.fixture
def second(served: Served) -> Iterator[ServerRecord]:
    """One more server of the same run, for one test."""
    with server_of(served.folder, served.run, "another") as (_, record):
        try:
            yield record
        finally:
            with suppress(ProcessLookupError):
                os.killpg(record.pid, signal.SIGCONT)


def settings_of(served: Served, **sglang: Any) -> dict[str, Any]:
    """A trainer of the served model that sends small buckets."""
    config = served_config(served.folder, served.run).model_dump(mode="json", exclude_none=True)
    config["rollout"]["sglang"] |= {"sync_bucket_bytes": 20_000} | sglang
    return config


@pytest.mark.parametrize(("way", "number"), [("distributed", signal.SIGKILL), ("tensor", signal.SIGSTOP)])
def test_the_other_server_gets_all_weights_and_all_requests(
    served: Served, second: ServerRecord, tmp_path: Path, way: str, number: int
) -> None:
    settings = settings_of(served, weight_sync=way, sync_timeout_s=30)
    (result,) = run_ranks(lose_a_server, 1, tmp_path, settings, way, number, second.pid)
    assert result["is_hit"]
    assert result["metrics"]["sync/servers"] == 1
    assert result["metrics"]["sync/probe_abs_diff_max"] <= 5e-5
    assert result["versions"] == {41}
    log = (tmp_path / "rank0.log").read_text()
    assert f"{second.url} gets no requests until a push reaches it" in log


def test_push_aborts_the_requests_of_a_dead_trainer(served: Served, tmp_path: Path) -> None:
    settings = settings_of(served)
    with pytest.raises(AssertionError, match=r"ranks ended with \[-9\]"):
        run_ranks(die_while_sampling, 1, tmp_path, settings)
    (metrics,) = run_ranks(push_once, 1, tmp_path, settings, 61)
    assert metrics["sync/probe_abs_diff_max"] <= 5e-5


def test_server_drops_the_requests_of_a_killed_trainer(served: Served, tmp_path: Path) -> None:
    """The server notices the broken connections by itself, without a push or an abort."""
    log = served.run / "servers" / "shared.log"
    num_before = log.read_bytes().count(DROPPED)
    with pytest.raises(AssertionError, match=r"ranks ended with \[-9\]"):
        run_ranks(die_while_sampling, 1, tmp_path, settings_of(served))
    deadline = time.monotonic() + DROPPED_WITHIN_S
    while (left := num_requests(served)) > 0:
        assert time.monotonic() < deadline, f"{left} requests are still at the server"
        time.sleep(0.2)
    wait_until(lambda: log.read_bytes().count(DROPPED) > num_before, 120)  # not sampled to their ends


@pytest.mark.parametrize("way", ["distributed", "tensor"])
def test_next_trainer_completes_the_push_of_a_dead_one(served: Served, tmp_path: Path, way: str) -> None:
    settings = settings_of(served, weight_sync=way)
    with pytest.raises(AssertionError, match=r"ranks ended with \[7\]"):
        run_ranks(die_in_the_middle, 1, tmp_path, settings)
    (metrics,) = run_ranks(push_once, 1, tmp_path, settings, 52)
    assert metrics["sync/probe_abs_diff_max"] <= 5e-5
