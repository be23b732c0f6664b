"""A real server whose cache is too small for what it is asked: retracted responses keep right routes."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.server import Server, plan_launch
from tests.support.collecting import sample_until
from tests.support.comparing import PARITY, compare, requests_of
from tests.support.records import metrics_of
from tests.support.sanity_run import make_task, settings
from tests.support.serving import KEY, MODEL, OPTIONS, ROOT, START_TIMEOUT_S, TIGHT, Served, served_config

PARAMS = SamplingParams(150, num_topk_log_probs=20, capture_routes=True)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    """SGLang's own switch retracts a request in every fiftieth batch too.

    Whether a small cache overflows depends on how far apart requests come in.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "true")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "50")
        yield patch


@pytest.fixture(scope="module")
def engine(served: Served, patch: pytest.MonkeyPatch) -> Iterator[SglangEngine]:
    """A second server, with the cache of one long response."""
    config = served_config(served.folder, served.run, **TIGHT)
    server = Server(plan_launch(config), served.run / "servers", "tight")
    try:
        record = server.start(START_TIMEOUT_S)
        assert record is not None
        yield SglangEngine(record.url, MODEL, api_key=KEY)
    finally:
        server.stop(grace_s=0)


def test_retracted_responses_have_the_routes_of_the_weights_that_sampled_them(
    served: Served, engine: SglangEngine
) -> None:
    before = engine.counts
    requests = requests_of("tight", num_prompts=12, samples=1)
    completions = engine.generate(requests, PARAMS)
    retracted = [completion for completion in completions if completion.num_retractions]
    print(f"{len(retracted)} of {len(completions)} responses were retracted")
    assert retracted
    assert max(compare(served, requests, completions, PARAMS)) <= PARITY
    found = engine.counts - before
    assert found.num_retractions == sum(completion.num_retractions for completion in retracted)
    assert found.num_without_routes == 0


def test_aborted_retracted_responses_resume(served: Served, engine: SglangEngine) -> None:
    """The server leaves out the last tokens of those in its queue; they go on from their earlier ones."""
    requests = requests_of("tight-aborted", num_prompts=12, samples=1)
    while any(request.partial is None for request in requests):
        seen = itertools.count(1)
        parts = sample_until(engine, requests, PARAMS, lambda completion, seen=seen: next(seen) >= 2)
        requests = [
            replace(request, partial=part) if part.tokens.numel() else request
            for request, part in zip(requests, parts, strict=True)
            if part.finish_reason == "abort" and part.tokens.numel() < PARAMS.max_response_tokens
        ]
    whole = engine.generate(requests, PARAMS)
    assert not engine.counts.num_refused_answers
    assert max(compare(served, requests, whole, PARAMS)) <= PARITY


def test_a_run_replays_the_routes_of_retracted_responses(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "4")
    tables = settings(
        make_task(tmp_path),
        "run",
        run={"num_rollouts": 2},
        rollout={"engine": "sglang", "sglang": {"num_own_servers": 1}, "prompts_per_rollout": 8},
        sglang=OPTIONS | TIGHT | {"context_length": 64, "max_total_tokens": 128},
        tracking={"paired_routing_every": 1},
    )
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "megatron_dppo", "train", config]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [row for row in metrics_of(tmp_path / "run") if row["kind"] == "rollout"]
    assert len(rollouts) == 2
    for row in rollouts:
        print({name: row[name] for name in row if "retract" in name or "routes" in name})
        assert row["rollout/recomputed_routes"] > 0 and row["rollout/dropped_samples"] == 0
        assert row["mismatch/abs_prob_diff_mean"] <= 1e-6
        assert row["routing/agreement_mean"] >= 0.99  # experts may tie
