"""Conversations sampled one by one equal conversations sampled in a batch, and none waits for another."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
import torch

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.data.prompts.templates import prompt_tokens
from megatron_dppo.engines.base import Request, SamplingParams, give_up, mask_of, resume_request
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.environments import (
    EnvironmentFault,
    Environments,
    InProcess,
    Observation,
    SingleTurn,
    Trajectory,
    Turn,
)
from megatron_dppo.errors import RewardError, RolloutError
from megatron_dppo.rewards import RewardFault, RewardRequest, RewardResult
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.types import Message, Prompt, Sample
from tests.support.byte_tokenizers import byte_tokenizer
from tests.support.collecting import MultiTurn
from tests.support.concurrent_engines import OneByOne, interrupted
from tests.support.samples import assert_same
from tests.support.scripted_policy import ScriptedPolicy
from tests.unit.test_episodes import THINKING_TEMPLATE
from tests.unit.test_multi_turn import ENDS, PARAMS, TOKENIZER, Recorded, Scripted, asked, multi_turn_engine
from tests.unit.test_transformers_engine import engine_of, moe_config, reference_model

LENGTHS = (5, 1, 3)
LIMITS = TurnLimits(max_turns=3, max_turn_tokens=4)


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    """Ends no response itself: each turn has all its tokens."""
    return engine_of(reference_model(moe_config()))


@pytest.fixture(scope="module")
def ending() -> TransformersEngine:
    return engine_of(reference_model(moe_config()), eos_token_ids=ENDS)


class Delayed(InProcess):
    """Answers when it may: after it waited for what `until` returns."""

    def __init__(self, until: Callable[[Trajectory], Awaitable[Any]]) -> None:
        super().__init__(Scripted)
        self.until = until

    async def answer(self, trajectory: Trajectory) -> Turn | EnvironmentFault:
        await self.until(trajectory)
        return await super().answer(trajectory)


def assert_same_conversation(one: Sample, other: Sample) -> None:
    """Equal in all but what batches of other sizes round."""
    for name in ("log_probs", "topk"):
        a, b = getattr(one, name), getattr(other, name)
        a, b = (a, b) if name == "log_probs" else (a.log_probs, b.log_probs)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert one.topk is not None and other.topk is not None
    assert torch.equal(one.topk.ids, other.topk.ids)
    nothing = torch.zeros(0)
    one, other = (dataclasses.replace(each, rollout_log_probs=nothing, topk=None) for each in (one, other))
    assert_same(one, other)


def test_concurrent_conversations_equal_batched_turns(ending: TransformersEngine) -> None:
    requests, one_by_one = asked(LENGTHS), OneByOne(ending)
    together = multi_turn_engine(ending).generate(requests, PARAMS)
    alone = multi_turn_engine(one_by_one).generate(requests, PARAMS)
    for one, other in zip(alone, together, strict=True):
        assert one.loss_mask is not None and not one.loss_mask.all()
        assert one.episode is not None and one.episode.num_turns == 3
        assert_same_conversation(one, other)
    assert len(one_by_one.asked) == 3 * len(requests)


@pytest.mark.parametrize("last", range(3))
def test_turns_together_keep_their_order(ending: TransformersEngine, last: int) -> None:
    """Whichever environment is the slowest, a call has all open conversations in the order of the requests."""
    requests, recorded = asked(LENGTHS), Recorded(ending)
    calls, counted = list[list[str]](), dict[int, int]()
    generate = recorded.generate

    def noted(batch: Sequence[Request], params: SamplingParams) -> list[Sample]:
        calls.append([request.id for request in batch])
        return generate(batch, params)

    recorded.generate = noted  # type: ignore[method-assign]
    others_answered = asyncio.Event()

    async def until(trajectory: Trajectory) -> None:
        turn = len(trajectory.responses)
        if turn != 1:
            return
        if trajectory.id == requests[last].id:
            await others_answered.wait()
        counted[turn] = counted.get(turn, 0) + 1
        if counted[turn] == len(requests) - 1:
            others_answered.set()

    slow = MultiTurn(cast(Any, recorded), Delayed(until), TOKENIZER, LIMITS)
    completions = slow.generate(requests, PARAMS)
    assert calls == [[request.id for request in requests]] * 3
    for one, other in zip(completions, multi_turn_engine(ending).generate(requests, PARAMS), strict=True):
        assert_same(one, other)


def test_a_slow_environment_holds_up_its_own_conversation_only(ending: TransformersEngine) -> None:
    requests, ended = asked(LENGTHS), asyncio.Event()
    num_ended = 0

    async def until(trajectory: Trajectory) -> None:
        nonlocal num_ended
        if trajectory.id == requests[0].id:
            await ended.wait()  # turns together would wait for ever
        num_ended += len(trajectory.responses) == 3
        if num_ended == len(requests) - 1:
            ended.set()

    one_by_one = OneByOne(ending)
    completions = MultiTurn(one_by_one, Delayed(until), TOKENIZER, LIMITS).generate(requests, PARAMS)
    assert one_by_one.asked[-2:] == [requests[0].id] * 2
    for one, other in zip(completions, multi_turn_engine(ending).generate(requests, PARAMS), strict=True):
        assert_same_conversation(one, other)


def conversation(
    ask: Callable[[Request, SamplingParams], Awaitable[Sample]],
    request: Request,
    environments: Environments | None = None,
    limits: TurnLimits = LIMITS,
    params: SamplingParams = PARAMS,
) -> Sample:
    conversations = Conversations(environments or InProcess(Scripted), TOKENIZER, limits)
    return asyncio.run(conversations.run(request, params, ask))


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_response_that_is_given_up_ends_its_conversation(engine: TransformersEngine, turn: int) -> None:
    num_asked = 0

    async def ask(request: Request, params: SamplingParams) -> Sample:
        nonlocal num_asked
        num_asked += 1
        return give_up(request) if num_asked == turn else engine.generate([request], params)[0]

    completion = conversation(ask, asked([5])[0])
    assert (num_asked, completion.finish_reason, completion.episode) == (turn, "abort", None)
    assert completion.tokens.numel() == {1: 0, 2: 4 + 2, 3: 4 + 2 + 4 + 1}[turn]


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_interrupted_turns_equal_uninterrupted_turns(engine: TransformersEngine, num_tokens: int) -> None:
    """Every turn is held after each `num_tokens` tokens, and resumed as a producer does."""
    left: list[int | None] = []

    async def ask(request: Request, params: SamplingParams) -> Sample:
        while True:
            left.append(params.max_turn_tokens)
            part = dataclasses.replace(params, max_turn_tokens=min(num_tokens, params.max_turn_tokens or 4))
            completion = engine.generate([request], part)[0]
            if completion.finish_reason == "stop":
                return completion
            rest = resume_request(request, interrupted(completion), params)
            if rest is None:
                return dataclasses.replace(completion, finish_reason="length")
            request, params = rest

    (request,) = asked([5])
    whole = conversation(OneByOne(engine).ask, request)
    assert whole.episode is not None and whole.episode.num_turns == 3
    assert_same_conversation(conversation(ask, request), whole)
    assert left[:2] == [4, 4 - num_tokens]


def test_interrupted_turn_resumes_with_its_remaining_limit(engine: TransformersEngine) -> None:
    (request,) = asked([5])
    params = dataclasses.replace(PARAMS, max_response_tokens=7, max_turn_tokens=5)
    assert resume_request(request, give_up(request), params) == (request, params), "nothing was sampled"
    part = dataclasses.replace(params, max_turn_tokens=2)
    two = interrupted(engine.generate([request], part)[0])
    rest = resume_request(request, two, params)
    assert rest is not None and rest[0].partial is two and rest[1].max_turn_tokens == 3
    longer = engine.generate([rest[0]], part)[0]
    assert longer.tokens.numel() == 4
    for asked_before in (rest, (request, params)):  # the rest of a rest, and the rest of the whole
        again = resume_request(asked_before[0], longer, asked_before[1])
        assert again is not None and again[1].max_turn_tokens == 1
    assert resume_request(request, longer, dataclasses.replace(params, max_turn_tokens=4)) is None
    assert resume_request(request, longer, dataclasses.replace(params, max_response_tokens=4)) is None
    unlimited = resume_request(request, longer, dataclasses.replace(params, max_turn_tokens=None))
    assert unlimited is not None and unlimited[1].max_turn_tokens is None


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_error_of_an_engine_propagates(engine: TransformersEngine, is_concurrent: bool) -> None:
    broken = dataclasses.replace(asked([1])[0], id="broken", prompt_tokens=(99,))
    multi_turn = multi_turn_engine(OneByOne(engine) if is_concurrent else engine)
    with pytest.raises(RolloutError, match=r"request broken: .* 99"):
        multi_turn.generate([*asked(LENGTHS), broken], PARAMS)


class Rewards:
    """Scores the length of a response once it may: after it waited for what `until` returns."""

    def __init__(self, until: Callable[[RewardRequest], Awaitable[Any]]) -> None:
        self.until, self.scored = until, list[str]()

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        self.scored.append(request.prompt.id)
        await self.until(request)
        if request.prompt.id == "1":
            return RewardFault("reward_failed", "the judge is away")
        return RewardResult(float(len(request.response.split())))

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        return [await self.score_one(request) for request in requests]


class GroupRewards:
    """Scores the rank of each response's length among those that it gets at once."""

    def __init__(self) -> None:
        self.scored = list[tuple[str, int]]()

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        await asyncio.sleep(0)
        self.scored.append((requests[0].prompt.id, len(requests)))
        lengths = [len(request.response) for request in requests]
        return [RewardResult(float(sorted(lengths).index(length))) for length in lengths]

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        raise AssertionError(request)


def begun() -> list[PromptGroup]:
    """The groups of three prompts, with two responses each."""
    maker = GroupMaker(TOKENIZER, 2, max_prompt_tokens=9, seed=1)
    prompts = [Prompt(str(i), "", "test", text=f"<bos> t{5 + i}") for i in range(3)]
    return maker.begin(2, [(i, Drawn(i, prompt)) for i, prompt in enumerate(prompts)])


def sampler_of(engine: Any, scorer: Scorer) -> GroupSampler:
    single = multi_turn_engine(engine, SingleTurn, max_turns=1, max_turn_tokens=None)
    return single.sampler(scorer, PARAMS)


def sampled(engine: Any, scorer: Scorer) -> list[PromptGroup]:
    groups = begun()
    sampler_of(engine, scorer).sample(groups)
    return groups


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_a_reward_of_groups_gets_each_group_once(ending: TransformersEngine, is_concurrent: bool) -> None:
    rewards = GroupRewards()
    scorer = Scorer(TOKENIZER, rewards, True, None, scores_groups=True)
    groups = sampled(OneByOne(ending) if is_concurrent else ending, scorer)
    assert sorted(rewards.scored) == [("0", 2), ("1", 2), ("2", 2)]
    assert all(group.is_whole for group in groups)
    for group in groups:
        texts = [
            len(TOKENIZER.decode(s.tokens[s.prompt_length :], skip_special_tokens=True)) for s in group.samples
        ]
        assert [each.reward for each in group.samples] == [sorted(texts).index(length) for length in texts]


def test_a_long_rollout_says_how_far_it_is(
    ending: TransformersEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def until(request: RewardRequest) -> None:
        pass

    scorer = Scorer(TOKENIZER, Rewards(until), True, None)
    monkeypatch.setattr("megatron_dppo.rollout.sampler.PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "megatron_dppo"):
        groups = sampled(OneByOne(ending), scorer)
    num_responses = sum(len(group.requests) for group in groups)
    assert re.search(rf"responses of this rank: {num_responses} of {num_responses} after \d+ s", caplog.text)


def test_scoring_begins_when_a_response_ends(ending: TransformersEngine) -> None:
    """The last response is requested only after a first reward was; results equal the serial ones."""
    one_by_one, first_scored = OneByOne(ending), asyncio.Event()
    ask = one_by_one.ask

    async def patient(request: Request, params: SamplingParams) -> Sample:
        if request.id.endswith("2+1"):
            await first_scored.wait()
        return await ask(request, params)

    async def until(request: RewardRequest) -> None:
        first_scored.set()

    one_by_one.ask = patient  # type: ignore[method-assign]
    scorer = Scorer(TOKENIZER, Rewards(until), True, None)
    early, late = sampled(one_by_one, scorer), sampled(ending, scorer)
    for one, other in zip(early, late, strict=True):
        assert [each.sample_id for each in one.faults] == [each.sample_id for each in other.faults]
        assert [each.reward for each in one.samples] == [each.reward for each in other.samples]
        assert [each.id for each in one.samples] == [each.id for each in other.samples]
    assert [len(group.samples) for group in early] == [2, 0, 2]


def test_slow_reward_delays_no_sampling(ending: TransformersEngine) -> None:
    one_by_one, ended = OneByOne(ending), asyncio.Event()
    rewards: Rewards

    async def until(request: RewardRequest) -> None:
        if len(rewards.scored) == 6:
            ended.set()
        elif request.prompt.id == "0":
            await ended.wait()

    rewards = Rewards(until)
    groups = sampled(one_by_one, Scorer(TOKENIZER, rewards, True, None))
    assert len(rewards.scored) == 6 and [len(group.samples) for group in groups] == [2, 0, 2]


def test_resumed_group_scores_each_response_once(ending: TransformersEngine) -> None:
    """Scores of responses stay with their groups; those that a hold left get theirs when they end."""

    class Waiting(OneByOne):
        async def ask(self, request: Request, params: SamplingParams) -> Sample:
            while request.id.endswith("/4+1") and num_sessions == 1 and not self.is_held:
                await asyncio.sleep(0)
            return await super().ask(request, params)

    async def until(request: RewardRequest) -> None:
        pass

    rewards, groups, num_sessions = Rewards(until), begun(), 1
    sampler = sampler_of(Waiting(ending), Scorer(TOKENIZER, rewards, True, None))

    async def sample() -> None:
        nonlocal num_sessions
        await sampler.go_on(version=0)
        for group in groups:
            sampler.begin(group)
        await sampler.wait(lambda: sum(group.is_whole for group in groups) == 2)
        await sampler.hold()
        assert sorted(rewards.scored) == ["0", "0", "1", "1", "2"]
        num_sessions = 2
        await sampler.go_on(version=0)
        await sampler.wait(lambda: all(group.is_whole for group in groups))
        await sampler.hold()
        await sampler.aclose()

    asyncio.run(sample())
    assert all(group.is_whole for group in groups) and sorted(rewards.scored) == ["0", "0", "1", "1", "2", "2"]


def test_error_in_scoring_ends_the_sampling(ending: TransformersEngine) -> None:
    async def until(request: RewardRequest) -> None:
        raise RewardError("data.reward: it never replies")

    with pytest.raises(RewardError, match="never replies"):
        sampled(OneByOne(ending), Scorer(TOKENIZER, Rewards(until), True, None))


OPENING: tuple[Message, ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1?"},
)


class Asking:
    """Asks three times, in a chat."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.said = list[str]()
        return Observation(
            None, ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"})
        )

    def step(self, response: str, finish_reason: Any) -> Turn:
        self.said.append(response)
        return Turn(None, 1.0, True) if len(self.said) == 3 else Turn(f"{len(self.said) + 1}?", 0.5, False)


KEEPING = THINKING_TEMPLATE.replace("{{ '<think>\n\n</think>\n\n' }}", "{{ '' }}")
WRITTEN = "m.content +"
SHORT = "(m.content if {} else m.content.split('</think>')[-1].strip()) +"
DROPPING = KEEPING.replace(WRITTEN, SHORT.format("loop.last"))
AFTER_THE_USER = KEEPING.replace(WRITTEN, SHORT.format("loop.index0 > ns.last"))


class Limited(ScriptedPolicy):
    """Notes how many tokens each request may have after its prompt."""

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        super().__init__(tokenizer, *texts)
        self.limits = list[int]()

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        self.limits.append(params.max_response_tokens)
        return await super().ask(request, params)


def thought(number: int) -> str:
    return f"<think>\nwell {number}\n</think>\n\n{number}."


def played(template: str, thinking: Any, texts: Sequence[str], **limits: Any) -> tuple[Any, Sample, Any]:
    """Return the policy, what it sampled, and the tokenizer, after a chat of three turns."""
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"), template, eos="<|im_end|>")
    policy, prompt = Limited(tokenizer, *texts), Prompt("0", "", "test", text="1")
    tokens = prompt_tokens(tokenizer, None, OPENING)
    request = Request("0+0", tokens, (1, 2, 3), prompt=prompt, is_chat=True, messages=OPENING)
    run = Conversations(InProcess(Asking), tokenizer, TurnLimits(max_turns=3, thinking=thinking)).run
    params = SamplingParams(limits.get("max_response_tokens", 400))
    return policy, asyncio.run(run(request, params, policy.ask)), tokenizer


def history_of(tokenizer: Any, texts: Sequence[str], number: int) -> str:
    """Return the prompt that a server writes for a client's chat, before a response."""
    chat = [*OPENING]
    for turn, text in enumerate(texts[:number], start=2):
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}?"}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("template", [DROPPING, AFTER_THE_USER, KEEPING], ids=["last", "after a user", "keeps"])
def test_conversations_follow_the_thinking_of_the_template(template: str) -> None:
    """Each response follows what a server would write, and trains once; each conversation has its noise."""
    texts = [thought(number) for number in range(3)]
    policy, last, tokenizer = played(template, "template", texts)
    inputs = [policy.input_of(number) for number in range(3)]
    assert inputs == [history_of(tokenizer, texts, number) for number in range(3)]
    parts = [*last.branches, last]
    assert len(parts) == (1 if template == KEEPING else 3)
    assert len({request.noise_key for request in policy.asked}) == len(parts)
    trained = [tokenizer.decode(part.tokens[mask_of(part)].tolist()) for part in parts]
    assert "".join(trained) == "".join(f"{text}<|im_end|>" for text in texts)
    first = policy.asked[0]
    for part, text in zip(parts, inputs[-len(parts) :], strict=True):
        whole = tokenizer.decode([*first.prompt_of(part), *part.tokens.tolist()])
        assert whole.startswith(text) or len(parts) == 1
    assert last.episode is not None and (last.episode.reward, last.episode.num_turns) == (2.0, 3)


def test_conversations_that_keep_their_thinking_are_one() -> None:
    texts = [thought(number) for number in range(3)]
    policy, kept, tokenizer = played(DROPPING, "keep", texts)
    assert kept.branches == () and kept.prompt_tokens is None
    assert "well 0" in policy.input_of(2) and "well 0" not in history_of(tokenizer, texts, 2)
    plain, one, tokenizer = played(DROPPING, "template", ["0.", "1.", "2."])
    assert one.branches == () and plain.input_of(2) == history_of(tokenizer, ["0.", "1."], 2), (
        "without thinking"
    )


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("num_left", [0, 1])
def test_a_conversation_that_begins_again_has_no_more_tokens_than_one(number: int, num_left: int) -> None:
    """Its prompt counts beyond the first prompt."""
    texts = [thought(number) for number in range(3)]
    tokenizer = played(DROPPING, "template", texts)[-1]
    lengths = [len(tokenizer.encode(history_of(tokenizer, texts, number))) for number in range(3)]
    most = lengths[number] - lengths[0] + num_left
    policy, last, _ = played(DROPPING, "template", texts, max_response_tokens=most)
    assert len(policy.asked) == number + num_left
    assert last.finish_reason == ("stop" if number + num_left == 3 else "length")
    assert [policy.limits[n] for n in range(number + num_left)] == [
        most - lengths[n] + lengths[0] for n in range(number + num_left)
    ]
