"""A real server after a proxy that corrupts replies: each sample comes once, or is dropped and counted."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch

from megatron_dppo.engines.base import EngineCounts, SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.errors import ServerError
from megatron_dppo.routing_replay.routes import overlap, validate_routes
from megatron_dppo.types import Prompt, Sample
from tests.sglang.fault_proxy import Fault, FaultProxy, of_routes
from tests.support.collecting import Collected, collect
from tests.support.comparing import PARITY, Lengths, Letters, as_answered, compare
from tests.support.serving import KEY, LAYERS, MODEL, Served
from tests.support.tiny import EXPERTS, TOP_K

NUM_PROMPTS, NUM_SAMPLES = 3, 4
ATTEMPTS = 3
PATIENCE = Patience(
    control_timeout_s=60,
    generate_timeout_s=600,
    max_attempts=ATTEMPTS,
    first_pause_s=0.05,
    connect_timeout_s=60,
)
PARAMS = SamplingParams(16, num_topk_log_probs=8, capture_routes=True)
routes_changed = partial(of_routes, shape=(LAYERS, TOP_K))


@dataclass(frozen=True)
class Case:
    """A fault in the replies to two requests, and the expected result."""

    fault: Fault
    reason: str | None = None  # why their samples are dropped; None: they are kept
    num_asked: int = 1  # attempts for each of the two requests
    counts: dict[str, int] = field(default_factory=dict)  # of the engine, all others 0
    patience: Patience = PATIENCE


def _byte_shifted(routes: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"\x01" + routes.tobytes()[:-1], "<i4")


def _out_of_range(routes: np.ndarray) -> np.ndarray:
    routes[-1, 0, 0] = EXPERTS
    return routes


RETRIED = {"num_retries": 2, "num_maybe_sampled_twice": 2}
GIVEN_UP = {"num_retries": 4, "num_maybe_sampled_twice": 4, "num_unanswered": 2}
WITHOUT_ROUTES = {"num_without_routes": 2}
CASES = {
    "slow": Case(Fault(delay_s=1.0)),
    "too slow": Case(
        Fault(delay_s=1e6),
        "aborted",
        counts={"num_timed_out": 2, "num_unanswered": 2},
        patience=replace(PATIENCE, generate_timeout_s=30.0),
    ),
    "500 once": Case(Fault(status=500, is_lasting=False), num_asked=2, counts=RETRIED),
    "500": Case(Fault(status=500), "aborted", num_asked=ATTEMPTS, counts=GIVEN_UP),
    "cut once": Case(Fault(is_cut=True, is_lasting=False), num_asked=2, counts=RETRIED),
    "cut": Case(Fault(is_cut=True), "aborted", num_asked=ATTEMPTS, counts=GIVEN_UP),
    "truncated once": Case(Fault(is_truncated=True, is_lasting=False), num_asked=2, counts=RETRIED),
    "truncated": Case(Fault(is_truncated=True), "aborted", num_asked=ATTEMPTS, counts=GIVEN_UP),
    "another's answer": Case(Fault(stands_for="first"), "aborted", counts={"num_refused_answers": 2}),
    "routes short": Case(
        Fault(change=routes_changed(lambda r: r[:-1])), "invalid_routes", counts=WITHOUT_ROUTES
    ),
    "routes shifted": Case(
        Fault(change=routes_changed(_byte_shifted)), "invalid_routes", counts=WITHOUT_ROUTES
    ),
    "routes of zeros": Case(
        Fault(change=routes_changed(np.zeros_like)), "invalid_routes", counts=WITHOUT_ROUTES
    ),
    "expert out of range": Case(
        Fault(change=routes_changed(_out_of_range)), "invalid_routes", counts=WITHOUT_ROUTES
    ),
}


@pytest.fixture(scope="module")
def proxy(served: Served) -> Iterator[FaultProxy]:
    with FaultProxy(served.url).running() as proxy:
        yield proxy


def _collected(engine: SglangEngine, rollout: int) -> Collected:
    assert MODEL.routing is not None
    return collect(
        engine,
        [Prompt(str(i), "", "test", text="what is " + "abcd"[i] * (i + 5)) for i in range(NUM_PROMPTS)],
        Letters(),
        Lengths(),
        PARAMS,
        samples_per_prompt=NUM_SAMPLES,
        max_prompt_tokens=64,
        seed=0,
        rollout=rollout,
        validate_routes=partial(validate_routes, routing=MODEL.routing),
    )


def _ids(rollout: int) -> list[str]:
    return [
        f"rollout{rollout}/{p}/{p * NUM_SAMPLES}+{k}" for p in range(NUM_PROMPTS) for k in range(NUM_SAMPLES)
    ]


def _faults(counts: EngineCounts) -> dict[str, int]:
    """Those that are not 0, without what was cached."""
    return {name: count for name, count in asdict(counts).items() if count and not name.endswith("_tokens")}


def _require_true(served: Served, samples: Sequence[Sample]) -> None:
    """Log-probs and routes equal a forward pass over the same tokens."""
    assert max(compare(served, *as_answered(samples), SamplingParams(99, capture_routes=True))) <= PARITY


@pytest.mark.parametrize("name", CASES)
def test_each_sample_comes_once_or_is_counted(served: Served, proxy: FaultProxy, name: str) -> None:
    case, number = CASES[name], list(CASES).index(name)
    engine = SglangEngine(proxy.url, MODEL, case.patience, api_key=KEY)
    ids = _ids(number)
    spoilt = [ids[1], ids[6]]
    fault = replace(case.fault, stands_for=ids[0]) if case.fault.stands_for else case.fault
    proxy.num_asked.clear()
    proxy.faults = dict.fromkeys(spoilt, fault)
    batch = _collected(engine, number)
    dropped = set(spoilt) if case.reason else set()
    assert Counter(sample.id for sample in batch.samples) == Counter(set(ids) - dropped)
    found = {reason: count for reason, count in batch.counts.num_dropped.items() if count}
    assert found == ({case.reason: len(dropped)} if case.reason else {})
    assert (batch.counts.num_samples, batch.counts.num_left_alone) == (len(ids), 0)
    assert proxy.num_asked == Counter({one: case.num_asked if one in spoilt else 1 for one in ids})
    assert _faults(engine.counts) == case.counts
    _require_true(served, batch.samples)

    proxy.faults, before = {}, engine.counts
    after = _collected(engine, 100 + number)
    assert Counter(sample.id for sample in after.samples) == Counter(_ids(100 + number))
    assert after.counts.num_dropped_samples == 0
    assert _faults(engine.counts - before) == {}
    _require_true(served, after.samples)


def test_routes_of_other_tokens_are_seen_by_the_agreement_alone(served: Served, proxy: FaultProxy) -> None:
    """Rows that are shifted as a whole are plausible for any tokens: no check of one reply can find them."""
    engine = SglangEngine(proxy.url, MODEL, PATIENCE, api_key=KEY)
    spoilt = _ids(200)[1]
    proxy.faults = {spoilt: Fault(change=routes_changed(lambda routes: np.roll(routes, 1, axis=0)))}
    batch = _collected(engine, 200)
    assert batch.counts.num_dropped_samples == 0
    (sample,) = [sample for sample in batch.samples if sample.id == spoilt]
    assert sample.routed_experts is not None
    with torch.no_grad():
        out = served.model(sample.tokens[None], output_router_logits=True)
    own = torch.stack([layer.topk(TOP_K).indices for layer in out.router_logits], dim=1)[:-1]
    rollout = sample.routed_experts.indices.long()
    agreement = overlap(own.flatten(0, 1), rollout.flatten(0, 1), EXPERTS)
    assert float(agreement.mean()) < 0.9
    _require_true(served, [other for other in batch.samples if other.id != spoilt])


def test_a_server_that_spoils_everything_ends_the_rollout(proxy: FaultProxy) -> None:
    """Nothing would be left to train on: it is an error, which names the server and what was found."""
    engine = SglangEngine(proxy.url, MODEL, PATIENCE, api_key=KEY)
    proxy.faults = dict.fromkeys(_ids(300), Fault(status=500))
    with pytest.raises(ServerError, match=r"/generate: found status 500 \(spoilt by the proxy\)"):
        _collected(engine, 300)
    proxy.faults = {}
    assert _collected(engine, 301).counts.num_dropped_samples == 0
