"""The engine against Hugging Face's forward pass of the same weights: log-probs, top-20, routes."""

import re
from functools import partial
from typing import Any

import pytest
import torch

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.engines.base import RolloutEngine, SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.model import served_model
from megatron_dppo.environments import InProcess, SingleTurn
from megatron_dppo.errors import ConfigError, ServerError
from megatron_dppo.rollout.conversations import TurnLimits
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.rollouts import build_engine
from megatron_dppo.rollout.scheduling import Scheduler, run_to_end
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.rollout.staleness import StalenessBound
from megatron_dppo.routing_replay.routes import validate_routes
from megatron_dppo.types import Prompt
from tests.support.collecting import Collected, MultiTurn, collect
from tests.support.comparing import FULL, PARITY, Lengths, Letters, as_answered, compare, requests_of
from tests.support.serving import CHUNK, KEY, MODEL, Served, served_config
from tests.support.tiny import write_model

PATIENCE = Patience(control_timeout_s=60, generate_timeout_s=600)


@pytest.fixture(scope="module")
def engine(served: Served) -> SglangEngine:
    return SglangEngine(served.url, MODEL, PATIENCE, api_key=KEY)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_topk_and_routes_equal_a_forward_pass(
    served: Served, engine: SglangEngine, temperature: float
) -> None:
    params = SamplingParams(24, temperature, num_topk_log_probs=20, capture_routes=True)
    requests = requests_of(f"t{temperature}", num_prompts=4, samples=4, length=17)
    completions = engine.generate(requests, params)
    worst, worst_topk = compare(served, requests, completions, params)
    print(f"temperature {temperature}: log-probs {worst:.1e}, top-20 {worst_topk:.1e}")
    assert worst <= PARITY
    assert worst_topk <= PARITY
    assert all(span.version == 0 for completion in completions for span in completion.weight_versions)


def test_routes_of_cached_prompts_are_whole_and_right(served: Served, engine: SglangEngine) -> None:
    first = requests_of("first", num_prompts=2, samples=1, length=60)
    engine.generate(first, FULL)
    again, before = requests_of("again", num_prompts=2, samples=6, length=60), engine.counts
    completions = engine.generate(again, FULL)
    counts = engine.counts - before
    assert counts.num_prompt_tokens == 12 * 60
    assert counts.num_cached_tokens >= 12 * 59  # all of each prompt but its last token
    assert max(compare(served, again, completions, FULL)) <= PARITY
    assert (counts.num_without_routes, counts.num_refused_answers, counts.num_unanswered) == (0, 0, 0)
    assert len({tuple(completion.tokens.tolist()) for completion in completions}) > 2  # samples differ


def test_routes_of_prompts_computed_in_chunks_are_whole_and_right(served: Served, engine: SglangEngine) -> None:
    requests = requests_of("chunks", num_prompts=4, samples=2, length=150)
    completions = engine.generate(requests, FULL)
    assert max(compare(served, requests, completions, FULL)) <= PARITY
    log = (served.run / "servers" / "shared.log").read_text()
    sizes = {int(size) for size in re.findall(r"Prefill batch.*#new-token: (\d+)", log)}
    assert max(sizes) == CHUNK


def test_responses_end_with_an_end_token_or_at_the_limit(served: Served, engine: SglangEngine) -> None:
    params = SamplingParams(200, temperature=1.5)
    completions = engine.generate(requests_of("ends", num_prompts=4, samples=4), params)
    reasons = {completion.finish_reason for completion in completions}
    assert "stop" in reasons
    for completion in completions:
        is_end = completion.tokens == 0
        assert not is_end[:-1].any()
        assert bool(is_end[-1]) or completion.tokens.numel() == 200


def test_built_engine_samples_scored_groups(served: Served) -> None:
    config = served_config(served.folder, served.run)
    engine: RolloutEngine = build_engine(config, served.folder, torch.device("cpu"))
    assert engine.weight_version == 0
    assert MODEL.routing is not None
    batch = collect(
        engine,
        [Prompt(str(i), "", "test", text="what is " + "abcd"[i] * 9) for i in range(4)],
        Letters(),
        Lengths(),
        FULL,
        samples_per_prompt=4,
        max_prompt_tokens=64,
        seed=0,
        rollout=0,
        validate_routes=partial(validate_routes, routing=MODEL.routing),
    )
    assert batch.counts.num_dropped_samples == 0
    assert [len(group.samples) for group in batch.groups] == [4] * 4
    assert all(sample.topk is not None and sample.reward is not None for sample in batch.samples)


def test_over_sampling_keeps_the_groups_that_finish_first(served: Served, engine: SglangEngine) -> None:
    params = SamplingParams(400, num_topk_log_probs=20, capture_routes=True)
    routing = MODEL.routing
    assert routing is not None
    scorer = Scorer(Letters(), Lengths(), True, partial(validate_routes, routing=routing))
    multi_turn = MultiTurn(engine, InProcess(SingleTurn), Letters(), TurnLimits())
    letters = "abcdefghijklmnopqrstuvwxyz"
    producer = Producer(
        GroupMaker(Letters(), 4, 64, seed=0),
        multi_turn.sampler(scorer, params),
        PromptStream([Prompt(x, "", "test", text="what is " + x * 9) for x in letters], 0, shuffle=False),
        (0, 1),
    )
    rollouts = Scheduler(StalenessBound(2, 0, over_sampling=4.0), producer, smallest_group=2)
    batches = list[Collected]()
    for rollout in range(2):
        taken = rollouts.next(rollout, engine.weight_version, lambda value: [value], run_to_end)
        assert taken is not None
        batches.append(Collected(*taken))
    for batch in batches:
        assert [len(group.samples) for group in batch.groups] == [4, 4]
        assert batch.counts.num_dropped_samples == batch.counts.num_continued == 0
        assert max(compare(served, *as_answered(batch.samples), params)) <= PARITY
    # On a busy machine all responses of a rollout may be whole at once.
    assert sum(batch.counts.num_discarded_partials for batch in batches) > 0
    assert rollouts.cursor == {"epoch": 0, "index": 16}
    ids = [sample.id for batch in batches for sample in batch.samples]
    assert len(ids) == len(set(ids))


def test_a_run_without_a_server_says_how_to_start_one(served: Served, tmp_path: Any) -> None:
    with pytest.raises(ServerError, match="SGLang server"):
        build_engine(served_config(served.folder, tmp_path), served.folder, torch.device("cpu"))


def test_a_model_that_would_be_served_wrongly_is_refused(tmp_path: Any) -> None:
    folder = write_model(tmp_path / "model", mlp_only_layers=[1])
    with pytest.raises(ConfigError, match=r"layers \[1\] "):
        served_model(folder, ())
