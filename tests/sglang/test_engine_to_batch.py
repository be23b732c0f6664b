"""The loss of a run gets what a real server returned: its replies are recorded on their way, and compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.fault_proxy import FaultProxy
from tests.support.serving import VERSION, server_of
from tests.support.trained_runs import EPOCHS, NUM_LAYERS, PROMPTS, SAMPLES, TURNS, Run, make_text_task
from tests.support.trained_tokens import Sampled, sampled_by_server

AHEAD = {"max_staleness": 1, "over_sampling": 2.0, "max_response_tokens": 30}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and prompts."""
    return make_text_task(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def url(task: Path) -> Iterator[str]:
    """A server of the model."""
    with server_of(task / "model", task / "run", "server") as (_, record):
        yield record.url


@pytest.mark.parametrize("rollout", [AHEAD, TURNS], ids=["ahead", "turns"])
def test_a_run_trains_on_what_a_server_returned(
    task: Path, url: str, tmp_path: Path, rollout: dict[str, Any]
) -> None:
    """Sampled ahead of the pushes, and in several turns; on two ranks."""
    (tmp_path / "run").mkdir()
    parallel = {"expert": 2, "max_tokens_per_microbatch": 200}
    run = Run(task, tmp_path, "servers", run={"num_rollouts": 3}, rollout=rollout, parallel=parallel)
    with FaultProxy(url).running() as proxy:
        run.register(proxy.url, VERSION)
        seen = run.play(2)
        calls = [call for passed in proxy.passed.values() for call in passed]
    layers = range(NUM_LAYERS)
    replies: list[Sampled] = [
        sampled_by_server(asked, reply, layers, NUM_LAYERS) for asked, reply in calls if reply["output_ids"]
    ]
    found = run.require_equal(seen, by_servers=replies, is_complete=rollout is TURNS)
    assert found.num_sequences == 3 * PROMPTS * SAMPLES * EPOCHS
    assert len(found.lengths) >= 4 and found.log_probs[0] < -3 and found.log_probs[1] > -0.1
    assert len({version for versions in found.versions for version in versions}) >= 2
    if rollout is TURNS:
        assert max(found.num_calls) == 3
