"""Agents on the real embedded engine, with harnesses in real workers that call over HTTP."""

import asyncio
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.agents.agents import Agents
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import Request, SamplingParams, give_up, num_tokens_before, num_tokens_left
from megatron_dppo.engines.batch_session import BatchSession
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.environments import InProcess, SingleTurn
from megatron_dppo.errors import AgentFailedError
from megatron_dppo.rewards import RewardResult
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import FinishReason, Prompt, Sample
from tests.support.collecting import Collected, MultiTurn, collect
from tests.support.concurrent_engines import OneByOne, interrupted
from tests.support.harnesses import post
from tests.support.samples import InProcessScorer, assert_same
from tests.unit.test_multi_turn import ENDS, EOS, PARAMS, TOKENIZER, Recorded, rolled_out, words_of
from tests.unit.test_transformers_engine import (
    checkpoint,
    engine_of,
    moe_config,
    reference_model,
    requests_of,
    teacher_forced,
)

HARNESSES = "tests.support.harnesses"


class Keyed(Recorded):
    """Remembers the keys of the noise, too."""

    def __init__(self, engine: TransformersEngine) -> None:
        super().__init__(engine)
        self.keys: dict[str, set[tuple[int, int, int]]] = {}

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        for request in requests:
            self.keys.setdefault(request.id, set()).add(request.noise_key)
        return super().generate(requests, params)


class WithAgents(MultiTurn):
    """Conversations of agents, and the completions that became samples."""

    def __init__(self, engine: Any, agents: Agents) -> None:
        self.engine, self.weight_version = engine, engine.weight_version
        run, self.completions = agents.converse(TOKENIZER), list[Sample]()

        async def converse(*arguments: Any) -> Sample:
            self.completions.append(await run(*arguments))
            return self.completions[-1]

        self.converse = converse


def agents_of(harness: str | None, command: Sequence[str] = (), **changes: Any) -> Agents:
    options: dict[str, Any] = {"call_timeout_s": 60.0} | changes
    agent = AgentConfig(harness=harness and f"{HARNESSES}:{harness}", command=tuple(command), **options)
    return Agents(RolloutConfig(agent=agent, max_turn_tokens=4), DataConfig(reward="x", max_prompt_tokens=9))


def play(
    engine: Any, agents: Agents, prompts: Sequence[Prompt], samples: int = 3
) -> tuple[Collected, WithAgents]:
    with closing(agents):
        conversations = WithAgents(engine, agents)
        scorer = InProcessScorer(_by_length)
        batch = collect(
            conversations, prompts, TOKENIZER, scorer, PARAMS, samples_per_prompt=samples, max_prompt_tokens=9,
            seed=1, rollout=2, environments=InProcess(SingleTurn), smallest_group=1,
        )  # fmt: skip
    return batch, conversations


def _by_length(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    return RewardResult(-1.0 - len(response.split()))


def prompt(name: str, answer: str = "", **changes: Any) -> Prompt:
    return Prompt(name, answer, "test", messages=({"role": "user", "content": f"t5 t{name}"},), **changes)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model(moe_config())


@pytest.fixture
def engine(model: Any) -> Keyed:
    return Keyed(engine_of(model, eos_token_ids=ENDS))


def test_a_conversation_over_http_is_the_same_as_with_an_environment(model: Any, engine: Keyed) -> None:
    prompts = [prompt("7", template_arguments={"quiet": True})]
    expected = rolled_out(engine_of(model, eos_token_ids=ENDS), prompts=prompts, max_turn_tokens=4)
    batch, _ = play(engine, agents_of("scripted"), prompts)
    assert len(batch.samples) == 3
    assert_same([replace(group, calls={}) for group in batch.groups], expected.groups)
    assert {len(calls) for group in batch.groups for calls in group.calls.values()} == {3}
    metrics = batch.counts.metrics()
    assert (metrics["agents/calls"], metrics["agents/forks"], metrics["agents/untrained_tokens"]) == (9, 0, 0)
    same = {name: value for name, value in metrics.items() if not name.startswith("agents/")}
    assert same == expected.counts.metrics()


def test_a_stop_string_ends_a_response_as_an_end_of_sequence_token_does(model: Any) -> None:
    """No tokens, log-probs, Top-K, routes or later responses depend on what is sampled after it."""
    stops = [f"t{token}" for token in ENDS if token != EOS]
    ending, endless = (Keyed(engine_of(model, eos_token_ids=ids, batch_size=1)) for ids in (ENDS, (EOS,)))
    expected, _ = play(ending, agents_of("stopping"), [prompt("6", "{}")])
    batch, _ = play(endless, agents_of("stopping"), [prompt("6", json.dumps({"stop": stops}))])
    assert_same(batch.samples, expected.samples)
    ends = [sample.finish_reason for sample in batch.samples]
    num_trained = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    num_sampled = sum(len(each) for sampled in endless.sampled.values() for each in sampled)
    assert "stop" in ends and num_sampled > num_trained
    metrics = batch.counts.metrics()
    assert metrics["agents/forks"] == 0 and metrics["agents/calls"] == 9
    assert metrics["agents/untrained_tokens"] == num_sampled - num_trained


def test_branches_roots_parallel_calls_and_retries_have_exact_tokens(engine: Keyed) -> None:
    batch, conversations = play(engine, agents_of("forking"), [prompt("6")], samples=2)
    assert batch.counts.num_dropped_samples == 0
    firsts = [sample for group in batch.groups for sample in group.rollouts]
    for first, completion in zip(firsts, sorted(conversations.completions, key=_id), strict=True):
        sampled, episode = engine.sampled[first.id], completion.episode
        assert episode is not None and episode.num_calls == len(sampled) == 6, "a retry samples nothing"
        assert len(engine.keys[first.id]) == 1 + episode.num_forks, "each fork has its own noise"
        is_alike = sampled[0] == sampled[1]  # then the later one is continued three times
        assert episode.num_forks == 3 + is_alike, "the second of two calls, a branch, and another root"
        samples = [sample for sample in batch.samples if sample.rollout_id == first.id]
        assert len(samples) == 3 + is_alike == 1 + len(completion.branches), "each leaf of the first prompt"
        assert [sample.branch for sample in samples] == list(range(len(samples)))
        assert episode.num_untrained_tokens == len(sampled[5]), "the other root"
        ends: list[list[int]] = []
        for sample in samples:
            assert sample.reward == 0.5 and sample.reward_info["replies"] == 1, "retries get equal bytes"
            trained = sample.tokens[sample.prompt_length :][sample.loss_mask].tolist()
            ends.append(trained)
            assert sample.topk is not None and (sample.topk.ids[sample.loss_mask] >= 0).all()
            assert sample.routed_experts is not None
            assert sample.routed_experts.indices.shape[0] == sample.tokens.numel() - 1
            assert sample.tokens[: sample.prompt_length].tolist() == TOKENIZER.apply_chat_template(
                [{"role": "user", "content": "t5"}], add_generation_prompt=True, return_dict=False
            )
        assert sorted(itertools.chain(*ends)) == sorted(itertools.chain(*sampled[:5])), "each token trains once"
        assert ends[0] == [*_first_of(sampled, ends[0]), *_rest_of(sampled, ends[0])]


def test_tokens_of_a_further_sample_with_a_fault_are_counted(
    engine: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained and what is not add up to what was sampled."""
    build = agents_of("forking")
    converse = build.converse

    def with_a_fault(tokenizer: Any) -> Any:
        run = converse(tokenizer)

        async def broken(*arguments: Any) -> Sample:
            completion = await run(*arguments)
            first, *others = completion.branches
            first = replace(first, rollout_log_probs=first.log_probs * float("nan"))
            return replace(completion, branches=(first, *others))

        return broken

    monkeypatch.setattr(build, "converse", with_a_fault)
    batch, conversations = play(engine, build, [prompt("6")], samples=2)
    metrics = batch.counts.metrics()
    num_sampled = sum(len(each) for sampled in engine.sampled.values() for each in sampled)
    num_trained = sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    num_branches = sum(len(each.branches) for each in conversations.completions)
    assert metrics["agents/branches"] == num_branches - 2 == len(batch.samples) - 2, "one of each episode"
    assert num_trained + metrics["agents/untrained_tokens"] == num_sampled


def _id(completion: Sample) -> str:
    return completion.request_id


def _first_of(sampled: list[list[int]], trained: list[int]) -> list[int]:
    """Return the one of the first two responses that the trained tokens begin with."""
    return next(each for each in sampled[:2] if trained[: len(each)] == each)


def _rest_of(sampled: list[list[int]], trained: list[int]) -> list[int]:
    """Return the later response that ends the trained tokens."""
    start = len(_first_of(sampled, trained))
    return next(each for each in sampled[2:5] if trained[start:] == each)


KINDS = ("good", "raises", "hangs", "dies", "words", "silent", "endless", "leaves")


def test_a_harness_that_fails_costs_its_own_sample(engine: Keyed) -> None:
    prompts = [prompt(str(n), kind) for n, kind in enumerate(KINDS)]
    batch, conversations = play(
        engine, agents_of("misbehaving", call_timeout_s=30.0, max_calls=4), prompts, samples=1
    )
    faults = {each.request_id: each.episode.fault for each in conversations.completions if each.episode}
    said = [next(fault for name, fault in faults.items() if f"/{n}/" in name) for n in range(len(KINDS))]
    kept = [group.prompt.answer for group in batch.groups]
    assert kept == ["good", "endless", "leaves"], said
    assert batch.counts.num_dropped["harness_failed"] == 5 == batch.counts.num_dropped_samples
    for words, fault in zip(
        ("no reason", "without a call", "SIGKILL", "many", "answered"), said[1:6], strict=True
    ):
        assert words in str(fault)
    good, endless, leaves = (group.rollouts[0] for group in batch.groups)
    assert good.reward == leaves.reward == 1.0
    assert endless.finish_reason == "length", "a limit cut it, and the reward scores what there is"
    assert endless.reward is not None and endless.reward < 0


def test_rewards_are_posted_and_nothing_changes_after_the_end(engine: Keyed, tmp_path: Path) -> None:
    agents = agents_of("posting")
    with closing(agents):
        conversations = WithAgents(engine, agents)
        batch = collect(
            conversations, [prompt("6", str(tmp_path / "key"))], TOKENIZER, InProcessScorer(_never), PARAMS,
            samples_per_prompt=1, max_prompt_tokens=9, seed=1, rollout=2,
        )  # fmt: skip
        (sample,) = batch.samples
        assert sample.reward == 0.25 and dict(sample.reward_info) == {"seen": 3.0}
        base_url, key = json.loads((tmp_path / "key").read_text())
        num_sampled = sum(map(len, engine.sampled.values()))
        for path in ("/chat/completions", "/reward"):
            body = {"messages": [{"role": "user", "content": "t5"}], "reward": 1.0}
            assert post(base_url, key, path, body)[0] == 409
            assert post(base_url, "0" * 32, path, body)[0] == 401
            assert post(base_url, "", path, body)[0] == 401
            assert post(base_url.replace("/v1", f"/e/{key}/v1"), "", path, body)[0] == 409
            assert post(base_url, "", path, body, Authorization="", **{"x-api-key": key})[0] == 409
        assert sum(map(len, engine.sampled.values())) == num_sampled
        assert conversations.completions[0].episode is not None


def _never(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
    raise AssertionError("the harness gives the reward")


class Halting(OneByOne):
    """Samples some tokens at a time, and waits for a push before the rest of a response."""

    def __init__(self, engine: TransformersEngine, lengths: Iterable[int] = itertools.repeat(2)) -> None:
        super().__init__(engine)
        self.stuck, self.lengths = False, iter(lengths)

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        if self.is_held:
            return give_up(request)
        left = num_tokens_left(request, params)
        part = replace(params, max_turn_tokens=min(next(self.lengths, left), left))
        completion = self.engine.generate([request], part)[0]
        num_new = completion.tokens.numel() - num_tokens_before(request)
        if completion.finish_reason != "length" or num_new == left:
            return completion
        self.stuck = True
        while not self.is_held:
            await asyncio.sleep(0.001)
        return interrupted(completion)


def with_pushes(
    agents: Agents, halting: Halting, checkpoints: Sequence[dict[str, Any]]
) -> tuple[Sample, Sample]:
    """Sample one conversation, with a push of the next weights whenever a response stops."""
    conversations = WithAgents(halting, agents)
    (group,) = GroupMaker(TOKENIZER, 1, max_prompt_tokens=9, seed=1).begin(2, [(0, Drawn(0, prompt("6")))])
    scorer = Scorer(TOKENIZER, InProcessScorer(_never), needs_routes=True, validate_routes=None)

    async def sample() -> None:
        async with aclosing(conversations.sampler(scorer, PARAMS)) as sampler:
            await sampler.go_on(7)
            sampler.begin(group)
            for version in itertools.count(8):
                while not halting.stuck and not group.is_whole and sampler.fault is None:
                    await asyncio.sleep(0.001)
                if group.is_whole or sampler.fault is not None:
                    assert sampler.fault is None
                    return
                halting.stuck = False
                await sampler.hold()
                halting.engine.load_weights(checkpoints[version % len(checkpoints)].items(), version)
                await sampler.go_on(version)

    with closing(agents):
        run_loop(sample())
    (sampled,), (completion,) = group.samples, conversations.completions
    return sampled, completion


@pytest.mark.parametrize("seed", range(4))
def test_pushes_at_random_moments_leave_each_token_with_its_weights(model: Any, seed: int) -> None:
    """Log-probs, Top-K and routes equal a forward pass by the weights of the token's version."""
    order, models = random.Random(seed), [reference_model(moe_config(), each) for each in (1, 2, 3)]
    halting = Halting(engine_of(model), (order.randint(1, 2) for _ in itertools.count()))
    sample, completion = with_pushes(agents_of("scripted"), halting, [checkpoint(each) for each in models])
    assert completion.episode is not None and completion.episode.num_calls == 3
    spans = completion.weight_versions
    assert {*range(7, 11)} <= {span.version for span in spans} and completion.topk is not None
    mask = completion.loss_mask
    assert mask is not None and ((completion.topk.ids >= 0).all(1) == mask).all()
    response = sample.tokens[sample.prompt_length :]
    assert sample.reward == len(words_of(response[mask])), "the client saw complete replies"
    request = Request("r", tuple(sample.tokens[: sample.prompt_length].tolist()), (0, 0, 0))
    for span in spans:
        weights = model if span.version == 7 else models[span.version % 3]
        logits, routes = teacher_forced(weights, request, completion)
        expected, places = torch.log_softmax(logits, -1), torch.arange(span.start, span.stop)
        assert mask[places].all()
        found = completion.log_probs[places], completion.topk.log_probs[places]
        scored = expected[places, completion.tokens[places]], expected[places].topk(3).values
        torch.testing.assert_close(found, scored, atol=2e-5, rtol=0)
        assert completion.routed_experts is not None
        # The forward pass of the previous token samples a token.
        before = places + sample.prompt_length - 1
        at = completion.routed_experts.indices[before].sort(-1).values
        assert torch.equal(at.long(), routes[before].sort(-1).values)


def test_a_call_that_is_cancelled_while_others_are_sampled_disturbs_none(model: Any) -> None:
    first, second = requests_of((3, 4))

    async def sample() -> Sample:
        session = BatchSession(engine_of(model).generate)
        with session.conversation(first.id), session.conversation(second.id):
            leaving, staying = (asyncio.create_task(session.ask(each, PARAMS)) for each in (first, second))
            await asyncio.sleep(0)  # both wait, and the engine is due
            leaving.cancel()
            return await staying

    (alone,) = engine_of(model).generate([second], PARAMS)
    found = run_loop(sample())
    assert (found.request_id, found.tokens.tolist()) == (second.id, alone.tokens.tolist())
    torch.testing.assert_close(found.log_probs, alone.log_probs, atol=1e-5, rtol=0)


COMMAND = """
import json, os, sys, urllib.request
task = json.load(open(sys.argv[2]))
assert sys.argv[3] == task["messages"][-1]["content"] and os.environ["ANTHROPIC_API_KEY"]
for url in (sys.argv[1], os.environ["OPENAI_BASE_URL"]):
    body = json.dumps({"messages": task["messages"]}).encode()
    key = {"x-api-key": os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    json.load(urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, key)))
sys.exit(int(task["answer"]))
"""


def test_a_command_is_a_harness(engine: Keyed) -> None:
    words = ("python", "-c", COMMAND, "{base_url}", "{task}", "{prompt}")
    batch, conversations = play(engine, agents_of(None, words), [prompt("6", "0"), prompt("7", "3")], samples=1)
    assert [group.prompt.answer for group in batch.groups] == ["0"]
    assert batch.counts.num_dropped["harness_failed"] == 1
    (sample,) = batch.groups[0].rollouts
    assert sample.reward == -1.0 - len(words_of(sample.tokens[sample.prompt_length :])), "data.reward scores it"
    faults = [str(each.episode and each.episode.fault) for each in conversations.completions]
    assert any("status 3" in fault for fault in faults)


@pytest.mark.parametrize("name", ["not_asynchronous", "absent"])
def test_a_harness_that_cannot_run_stops_the_run_at_its_start(name: str) -> None:
    with closing(agents_of(name)) as agents, pytest.raises(AgentFailedError) as raised:
        agents.start()
    assert str(raised.value).startswith("rollout.agent.harness: ")
