"""Conversations of several turns on the real embedded engine, with environments that follow a script."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.data.batches.packing import pack
from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import Request, SamplingParams, give_up
from megatron_dppo.engines.batch_session import BatchSession
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.engines.embedded.sampling import draw, sampling_noise
from megatron_dppo.environments import Environment, InProcess, Observation, SingleTurn, Turn
from megatron_dppo.errors import RolloutError
from megatron_dppo.rewards import RewardResult
from megatron_dppo.rollout.conversations import TurnLimits, TurnTokenizer
from megatron_dppo.rollout.groups import GroupMaker, usable_groups
from megatron_dppo.rollout.scoring import OverlongShaping, Scorer
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.runtime.concurrency import run_loop
from megatron_dppo.types import FinishReason, Message, Prompt, Sample
from tests.support.collecting import Collected, InBatches, MultiTurn, collect
from tests.support.samples import InProcessScorer, assert_same
from tests.support.word_tokenizers import word_tokenizer
from tests.unit.test_transformers_engine import (
    engine_of,
    moe_config,
    reference_model,
    requests_of,
    teacher_forced,
)

WORDS = {
    word: i for i, word in enumerate([*(f"t{i}" for i in range(36)), "<bos>", "<user>", "<policy>", "<eos>"])
}
EOS = WORDS["<eos>"]
ENDS = (EOS, *range(8, 32, 2))
PARAMS = SamplingParams(24, num_topk_log_probs=3, capture_routes=True)


TOKENIZER = word_tokenizer(
    WORDS,
    "<bos> {% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<policy>' }} {{ m['content'] }} "
    "<eos> {% endfor %}{% if add_generation_prompt %}<policy> {% if quiet %}t9 {% endif %}{% endif %}",
    bos_token="<bos>",
    eos_token="<eos>",
)


def text_of(tokens: Any) -> str:
    return str(TOKENIZER.decode(tokens))


def words_of(tokens: Any) -> list[str]:
    return str(TOKENIZER.decode(tokens, skip_special_tokens=True)).split()


class Scripted:
    """Replies "t1 t2", then "t3", and ends with the third turn; a turn's reward is its number of words."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.prompt, self.num_turns = prompt, 0
        return Observation(prompt.text, prompt.messages)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        self.num_turns += 1
        assert "<eos>" not in response, "special tokens stay away from environments"
        says = ["t1 t2", "t3", None][self.num_turns - 1]
        return Turn(says, float(len(response.split())), says is None, {"turns": float(self.num_turns)})


class Recorded(InBatches):
    """The engine, and what it sampled, request by request."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.weight_version = engine, engine.weight_version
        self.sampled: dict[str, list[list[int]]] = {}

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        completions = self.engine.generate(requests, params)
        for request, completion in zip(requests, completions, strict=True):
            start = request.partial.tokens.numel() if request.partial else 0
            self.sampled.setdefault(request.id, []).append(completion.tokens[start:].tolist())
        return completions


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model(moe_config())


def multi_turn_engine(engine: Any, environment: type[Environment] = Scripted, **limits: Any) -> MultiTurn:
    given: dict[str, Any] = {"max_turns": 3, "max_turn_tokens": 4} | limits
    chosen = TurnLimits(**given)
    return MultiTurn(engine, InProcess(environment), TOKENIZER, chosen)


def asked(lengths: Sequence[int]) -> list[Request]:
    prompts = [Prompt(str(i), "", "test", text="t0") for i in range(len(lengths))]
    requests = zip(requests_of(lengths), prompts, strict=True)
    return [dataclasses.replace(request, prompt=prompt) for request, prompt in requests]


def rolled_out(
    engine: Any, texts: Sequence[str] = ("<bos> t5 t6", "<bos> t7"), environment: Any = Scripted, **changes: Any
) -> Collected:
    limits = {key: changes.pop(key) for key in ("max_turns", "max_turn_tokens") if key in changes}
    multi_turn = multi_turn_engine(engine, environment, **limits)
    prompts = changes.pop("prompts", None)
    prompts = prompts or [Prompt(str(i), "", "test", text=text) for i, text in enumerate(texts)]
    scorer = InProcessScorer(changes.pop("reward", lambda prompt, response, finish: RewardResult(-1.0)))
    return collect(
        multi_turn, prompts, TOKENIZER, scorer, changes.pop("params", PARAMS),
        samples_per_prompt=3, max_prompt_tokens=9, seed=1, rollout=2,
        environments=InProcess(environment), **changes,
    )  # fmt: skip


def spans_of(sample: Sample | Sample) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in sample.weight_versions]


def test_trained_tokens_equal_the_sampled_tokens(model: Any) -> None:
    engine = Recorded(engine_of(model, eos_token_ids=ENDS))
    batch = rolled_out(engine)
    assert len(batch.samples) == 6 and batch.counts.num_dropped_samples == 0
    assert any(len(turn) < 4 for turns in engine.sampled.values() for turn in turns), (
        "some turns end themselves"
    )
    for sample in batch.samples:
        first, second, third = engine.sampled[sample.id]
        spoken = [*first, WORDS["t1"], WORDS["t2"], *second, WORDS["t3"], *third]
        assert sample.tokens[sample.prompt_length :].tolist() == spoken
        mask = [True] * len(first) + [False] * 2 + [True] * len(second) + [False] + [True] * len(third)
        assert sample.loss_mask.tolist() == mask
        starts = [0, len(first) + 2, len(first) + len(second) + 3]
        assert spans_of(sample) == [
            (s, s + len(t)) for s, t in zip(starts, (first, second, third), strict=True)
        ]
        assert sample.topk is not None and (sample.topk.ids >= 0).all(1).tolist() == mask
        words = sum(len(words_of(turn)) for turn in (first, second, third))
        assert (sample.reward, sample.reward_info) == (words, {"turns": 3.0})
        assert sample.finish_reason == ("stop" if third[-1] in ENDS else "length")
        trained = pack([dataclasses.replace(sample, advantage=1.0, token_weights=sample.loss_mask.float())])
        learns = trained.targets[trained.loss_mask]
        assert learns.tolist() == [*first, *second, *third]
    assert batch.counts.metrics()["rollout/num_turns_mean"] == 3.0
    assert batch.counts.num_continued == 0  # the observations divide the tokens of one weight version


@pytest.mark.parametrize("batch_size", [2, 16])
def test_mu_top_k_and_routes_are_those_of_one_forward_over_the_conversation(
    model: Any, batch_size: int
) -> None:
    requests = asked([5, 1, 3, 8, 2])
    completions = multi_turn_engine(engine_of(model, batch_size=batch_size)).generate(requests, PARAMS)
    for request, completion in zip(requests, completions, strict=True):
        logits, choices = teacher_forced(model, request, completion)
        log_probs, mask = torch.log_softmax(logits, -1), completion.loss_mask
        assert mask is not None and mask.sum() == 12 and mask.numel() == 15
        expected = log_probs.gather(1, completion.tokens[:, None])[:, 0]
        torch.testing.assert_close(completion.log_probs[mask], expected[mask], atol=1e-5, rtol=0)
        assert not completion.log_probs[~mask].any()
        values, ids = log_probs.topk(3, -1)
        topk, routes = completion.topk, completion.routed_experts
        assert topk is not None and routes is not None
        torch.testing.assert_close(topk.log_probs[mask], values[mask], atol=1e-5, rtol=0)
        assert torch.equal(topk.ids[mask].long(), ids[mask]) and (topk.ids[~mask] == -1).all()
        assert routes.indices.shape[0] == len(request.prompt_tokens) + 15 - 1
        assert torch.equal(routes.indices.long(), choices)


def test_noise_of_a_turn_depends_on_its_position(model: Any) -> None:
    requests = asked([5, 1, 3])
    for request, completion in zip(
        requests, multi_turn_engine(engine_of(model)).generate(requests, PARAMS), strict=True
    ):
        logits, _ = teacher_forced(model, request, completion)
        drawn = draw(torch.log_softmax(logits, -1), sampling_noise(request.noise_key, logits.shape[0]))
        mask = completion.loss_mask
        assert mask is not None
        assert torch.equal(drawn[mask], completion.tokens[mask])


def test_conversations_are_reproducible_bit_for_bit(model: Any) -> None:
    first, second = rolled_out(engine_of(model)), rolled_out(engine_of(model))
    assert_same(list(first.groups), list(second.groups))


def test_one_turn_conversation_equals_the_engines_completion(model: Any) -> None:
    requests = asked([5, 1, 3])
    multi_turn = multi_turn_engine(engine_of(model), SingleTurn, max_turns=1, max_turn_tokens=None)
    plain = engine_of(model).generate(requests, PARAMS)
    for one, other in zip(multi_turn.generate(requests, PARAMS), plain, strict=True):
        assert one.episode is not None and one.episode.reward is None
        assert_same(dataclasses.replace(one, episode=None), other)


def test_without_an_environment_a_response_is_one_request(model: Any) -> None:
    """It has the samples, rewards and counts of a conversation of one turn, with the same limit."""
    engine = engine_of(model, eos_token_ids=ENDS)
    rewards = InProcessScorer(
        lambda prompt, response, finish_reason: RewardResult(float(len(response.split())))
    )
    scorer = Scorer(TOKENIZER, rewards, True, None, OverlongShaping(24, 20, 1.0))
    data = DataConfig(reward="x", max_prompt_tokens=9)
    plain = TrajectorySampler(RolloutConfig(max_turn_tokens=5), data, engine, Path())
    turns = multi_turn_engine(engine, SingleTurn, max_turns=1, max_turn_tokens=5)
    found: list[Any] = []
    for sampler in (plain.sampler(TOKENIZER, scorer, PARAMS), turns.sampler(scorer, PARAMS)):
        places = [(n, Drawn(n, Prompt(str(n), "", "test", text=f"<bos> t{n}"))) for n in range(3)]
        groups = GroupMaker(TOKENIZER, 2, max_prompt_tokens=9, seed=1).begin(2, places)
        sampler.sample(groups)
        found.append(usable_groups(groups, (), 2, num_too_long=0, weight_version=1))
    (alone, counts), (in_turns, counts_in_turns) = found
    assert_same(alone, in_turns)
    assert counts == counts_in_turns and counts.metrics()["rollout/num_turns_mean"] == 1.0
    lengths = {sample.response_length for group in alone for sample in group.samples}
    assert max(lengths) == 5 > min(lengths), "the limit ends some responses, and others end before it"


def test_a_rollout_is_not_written_out_as_text(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `signal` formats what `asyncio.run` returned, tensors and all."""
    texts: list[str] = []
    as_text = torch.Tensor.__repr__

    def counted(tensor: torch.Tensor, **options: Any) -> str:
        texts.append(as_text(tensor, **options))
        return texts[-1]

    monkeypatch.setattr(torch.Tensor, "__repr__", counted)
    assert rolled_out(engine_of(model)).groups and not texts


def test_limits_end_a_conversation_and_it_counts_as_cut(model: Any) -> None:
    batch = rolled_out(engine_of(model), max_turns=2)
    assert batch.counts.metrics()["rollout/num_turns_mean"] == 2.0
    assert batch.counts.num_truncated == 6
    assert all(sample.response_length == 4 + 2 + 4 for sample in batch.samples)
    short = dataclasses.replace(PARAMS, max_response_tokens=11)
    batch = rolled_out(engine_of(model), params=short)  # the third turn's observation leaves no room
    assert {sample.response_length for sample in batch.samples} == {10}
    assert {sample.finish_reason for sample in batch.samples} == {"length"}
    short = dataclasses.replace(PARAMS, max_response_tokens=12)
    batch = rolled_out(engine_of(model), params=short)
    assert {sample.response_length for sample in batch.samples} == {12}


def test_last_response_is_scored_if_no_turn_has_a_reward(model: Any) -> None:
    class Silent(Scripted):
        def step(self, response: str, finish_reason: FinishReason) -> Turn:
            return dataclasses.replace(super().step(response, finish_reason), reward=None)

    def reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        return RewardResult(float(len(response.split())), {"scored": 1.0})

    for sample in rolled_out(engine_of(model), environment=Silent, reward=reward).samples:
        last = sample.tokens[-4:]
        assert sample.reward == len(words_of(last))
        assert sample.reward_info == {"turns": 3.0, "scored": 1.0}


def test_turn_rewards_of_0_sum_to_0(model: Any) -> None:
    class Strict(Scripted):
        def step(self, response: str, finish_reason: FinishReason) -> Turn:
            return dataclasses.replace(super().step(response, finish_reason), reward=0.0)

    assert {sample.reward for sample in rolled_out(engine_of(model), environment=Strict).samples} == {0.0}


@pytest.mark.parametrize("gives_reward", [True, False])
def test_only_sampled_tokens_are_overlong_whoever_gives_the_reward(model: Any, gives_reward: bool) -> None:
    class Rewarding(Scripted):
        def step(self, response: str, finish_reason: FinishReason) -> Turn:
            turn = super().step(response, finish_reason)
            return dataclasses.replace(turn, reward=(0.5 if turn.done else 0.0) if gives_reward else None)

    def reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        assert not gives_reward
        return RewardResult(0.5)

    batch = rolled_out(
        engine_of(model), environment=Rewarding, reward=reward, overlong=OverlongShaping(18, 10, 5.0)
    )
    assert {sample.response_length for sample in batch.samples} == {15}  # 3 of them are observations
    assert {sample.reward for sample in batch.samples} == {0.5 - 5.0 * (12 - 8) / 10}
    assert {sample.reward_info["overlong_penalty"] for sample in batch.samples} == {-2.0}


class Silent(Recorded):
    """Ends some turns, counted from 1, without a token."""

    def __init__(self, engine: TransformersEngine, turns: Sequence[int]) -> None:
        super().__init__(engine)
        self.turns, self.num_turns = turns, 0

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        self.num_turns += 1
        if self.num_turns not in self.turns:
            return super().generate(requests, params)
        return [
            dataclasses.replace(request.partial or give_up(request), finish_reason="stop")
            for request in requests
        ]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("turns", [(1,), (2,), (1, 2), (3,)])
def test_turn_without_a_token_gets_an_observation(model: Any, turns: Sequence[int], is_chat: bool) -> None:
    prompt = Prompt("0", "", "test", text="t5")
    if is_chat:
        prompt = Prompt("0", "", "test", messages=({"role": "user", "content": "t5"},))
    engine = Silent(engine_of(model, eos_token_ids=(EOS,)), turns)
    params = SamplingParams(40)
    batch = rolled_out(engine, prompts=[prompt], params=params)
    assert len(batch.samples) == 3
    for sample in batch.samples:
        said = text_of(sample.tokens[sample.prompt_length :][~sample.loss_mask])
        observations = said.replace("<eos> <user>", "<user>").split()
        assert [word for word in observations if word.startswith("t")] == ["t1", "t2", "t3"]
        assert 0 < sample.loss_mask.sum() <= 4 * (3 - len(turns)) and sample.reward_info["turns"] == 3.0
        if is_chat:  # the end of each turn is written once, also of an empty one
            assert text_of(sample.tokens).count("<eos> <user>") == 2


def test_conversation_of_empty_turns_is_dropped(model: Any) -> None:
    silent = Silent(engine_of(model), (1, 2, 3))
    batch = rolled_out(silent, texts=["<bos> t5"], params=SamplingParams(40))
    assert batch.counts.num_dropped["empty_response"] == batch.counts.num_dropped_samples == 3
    assert batch.groups == [] and batch.counts.num_dropped_groups == 1


class Failing(Scripted):
    """Fails in the second turn of prompt 1, in the way `how`."""

    how: Any = None

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        turn = super().step(response, finish_reason)
        return self.how(turn) if self.prompt.id == "1" and self.num_turns == 2 else turn


def broken(turn: Turn) -> Turn:
    raise KeyError("the board is lost")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (broken, "KeyError: 'the board is lost'"),
        (lambda turn: None, "found a NoneType from step; expected a Turn"),
        (lambda turn: dataclasses.replace(turn, observation=None), "expected text until it is done"),
        (lambda turn: dataclasses.replace(turn, reward=float("nan")), "expected finite numbers"),
        (lambda turn: dataclasses.replace(turn, info={"x": "much"}), "expected numbers"),
        (lambda turn: dataclasses.replace(turn, reward=3e38), "found a reward of 3e+38"),
    ],
)
def test_an_environment_that_fails_costs_its_own_samples(model: Any, how: Any, message: str) -> None:
    environment = type("Failing", (Failing,), {"how": staticmethod(how)})
    batch = rolled_out(engine_of(model), environment=environment)
    sound, *_ = rolled_out(engine_of(model)).groups
    assert [group.prompt.id for group in batch.groups] == ["0"]
    for found, expected in zip(batch.groups[0].samples, sound.samples, strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.reward == expected.reward
        torch.testing.assert_close(found.rollout_log_probs, expected.rollout_log_probs)
    dropped = batch.counts.num_dropped["environment_failed"] + batch.counts.num_dropped["reward_failed"]
    assert dropped == batch.counts.num_dropped_samples == 3
    assert batch.counts.example is not None and message in batch.counts.example


def test_an_environment_that_does_not_begin_costs_its_samples(model: Any) -> None:
    class Closed(Scripted):
        def reset(self, prompt: Prompt, seed: int) -> Observation:
            if prompt.id == "1":
                raise ValueError("closed")
            return super().reset(prompt, seed)

    batch = rolled_out(engine_of(model), environment=Closed)
    assert len(batch.samples) == 3 and batch.counts.num_dropped["environment_failed"] == 3


@pytest.mark.parametrize(("arguments", "begin"), [(None, ""), ({"quiet": True}, " t9")])
def test_in_a_chat_observations_are_messages(model: Any, arguments: Any, begin: str) -> None:
    messages: tuple[Message, ...] = ({"role": "user", "content": "t5"},)
    batch = rolled_out(
        engine_of(model, eos_token_ids=(EOS,)),
        prompts=[Prompt("chat", "", "test", messages=messages, template_arguments=arguments)],
        params=dataclasses.replace(PARAMS, max_response_tokens=40),
    )
    for sample in batch.samples:
        assert text_of(sample.tokens[: sample.prompt_length]) == f"<bos> <user> t5 <eos> <policy>{begin}"
        said = text_of(sample.tokens[sample.prompt_length :][~sample.loss_mask]).replace(
            "<eos> <user>", "<user>"
        )
        assert said == f"<user> t1 t2 <eos> <policy>{begin} <user> t3 <eos> <policy>{begin}"
        assert text_of(sample.tokens).count("<eos> <user>") == 2  # after either kind of end, once


def test_missing_end_token_of_a_response_is_added() -> None:
    turn_tokenizer = TurnTokenizer(TOKENIZER)
    assert text_of(turn_tokenizer.observation("t4", EOS, is_chat=True)) == "<user> t4 <eos> <policy>"
    assert text_of(turn_tokenizer.observation("t4", 3, is_chat=True)) == "<eos> <user> t4 <eos> <policy>"
    assert text_of(turn_tokenizer.observation("t4", EOS, is_chat=False)) == "t4"


def test_conversations_wait_for_each_other_once_a_turn(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, sample = list[int](), BatchSession._sample
    monkeypatch.setattr(BatchSession, "_sample", lambda self: (looked.append(1), sample(self)))
    completions = multi_turn_engine(engine_of(model)).generate(asked([5, 1, 3, 8, 2, 4, 6, 7, 3, 2]), PARAMS)
    assert {completion.episode and completion.episode.num_turns for completion in completions} == {3}
    assert len(looked) <= 2 * 3 + 1, "not once for each conversation"


def test_a_batch_that_is_held_gives_up_what_waits() -> None:
    """And what is asked later; a batch with too few completions is the engine's fault."""

    async def work() -> list[Sample]:
        session = BatchSession(lambda requests, params: [])
        with session.conversation("busy"):  # so that nothing is sampled yet
            first = asyncio.ensure_future(session.ask(asked([1])[0], PARAMS))
            await asyncio.sleep(0)
            await session.hold()
            return [await first, await session.ask(asked([2])[0], PARAMS)]

    assert [each.finish_reason for each in run_loop(work())] == ["abort", "abort"]
    with pytest.raises(RolloutError, match="found 0 completions; expected one for each of 1"):
        run_loop(BatchSession(lambda requests, params: []).ask(asked([1])[0], PARAMS))
