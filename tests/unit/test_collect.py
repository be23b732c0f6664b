"""Collecting samples with a fake, scripted engine. Real engines have separate tests."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.engines.base import EngineCounts, Request, SamplingParams, response_alone
from megatron_dppo.errors import RolloutError, RoutingReplayError
from megatron_dppo.rewards import RewardResult, arithmetic_reward
from megatron_dppo.rollout.counts import DROP_REASONS, DropReason, refuse_if_too_many_dropped
from megatron_dppo.rollout.groups import write_samples
from megatron_dppo.types import (
    FinishReason,
    Message,
    Prompt,
    RolloutTopK,
    RoutedExperts,
    Sample,
    WeightVersionSpan,
)
from tests.support.collecting import Collected, InBatches, collect
from tests.support.records import lines_of
from tests.support.samples import InProcessScorer
from tests.support.word_tokenizers import TOKENIZER

RIGHT = "w3 8 4 0 + w0 6 3 0 + w17 # 8 0 4 0 <eos>"
WRONG = "w3 # 1 0 0 0 <eos>"
PROMPTS = [Prompt(name, "408", "test", text="<bos> 2 1 * 4 3 =") for name in ("a", "b", "c")]
PARAMS = SamplingParams(max_response_tokens=20)


def complete(request: Request, text: str, **changes: Any) -> Sample:
    tokens = torch.tensor(TOKENIZER.encode(text), dtype=torch.int64)
    finish: FinishReason = "stop" if text.endswith("<eos>") else "length"
    spans = (WeightVersionSpan(0, len(tokens), 7),)
    whole = response_alone(request.id, tokens, torch.full((len(tokens),), -0.5), finish, None, None, spans)
    return dataclasses.replace(whole, **changes)


class ScriptedEngine(InBatches):
    """Answers request i of a call with `script(i, request)`."""

    weight_version, counts = 7, EngineCounts()
    refusals: Mapping[str, int] = MappingProxyType({})

    def __init__(self, script: Callable[[int, Request], Sample]) -> None:
        self.script = script
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        self.requests += requests
        return [self.script(i, request) for i, request in enumerate(requests)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        raise NotImplementedError


def collect_with(
    script: Callable[[int, Request], Sample],
    prompts: Sequence[Prompt] = PROMPTS,
    params: SamplingParams = PARAMS,
    **changes: Any,
) -> Collected:
    keywords: dict[str, Any] = {"samples_per_prompt": 4, "max_prompt_tokens": 7, "seed": 1, "rollout": 2}
    reward = changes.pop("reward", arithmetic_reward)
    return collect(
        ScriptedEngine(script), prompts, TOKENIZER, InProcessScorer(reward), params, **keywords | changes
    )


def right_or_wrong(i: int, request: Request) -> Sample:
    return complete(request, RIGHT if i % 2 == 0 else WRONG)


def faulty(fault_at: Sequence[int], **fault: Any) -> Callable[[int, Request], Sample]:
    return lambda i, request: complete(request, RIGHT, **(fault if i in fault_at else {}))


def dropped(batch: Collected) -> dict[DropReason, int]:
    return {reason: n for reason, n in batch.counts.num_dropped.items() if n}


def test_groups_hold_scored_samples() -> None:
    batch = collect_with(right_or_wrong)
    assert [group.prompt for group in batch.groups] == PROMPTS
    for group in batch.groups:
        assert [sample.reward for sample in group.samples] == [1.0, 0.0, 1.0, 0.0]
        assert len({sample.group_id for sample in group.samples}) == 1
    sample = batch.samples[0]
    assert TOKENIZER.decode(sample.tokens) == "<bos> 2 1 * 4 3 = " + RIGHT
    assert sample.prompt_length == 7 and sample.response_length == 17
    assert sample.loss_mask.dtype == torch.bool and sample.loss_mask.sum() == 17
    assert sample.rollout_log_probs.shape == (17,)
    assert sample.reward_info == {"has_answer": 1.0}
    assert sample.advantage is None
    assert sample.weight_versions == (WeightVersionSpan(0, 17, 7),)
    assert len({sample.id for sample in batch.samples}) == 12
    assert batch.counts.num_samples == 12 and batch.counts.num_dropped_samples == 0
    assert batch.counts.num_response_tokens == 6 * (17 + 7)


def test_noise_keys_do_not_depend_on_the_number_of_ranks() -> None:
    def keys(prompts: Sequence[Prompt], indices: Sequence[int] | None = None) -> list[tuple[int, int, int]]:
        engine = ScriptedEngine(right_or_wrong)
        collect(
            engine, prompts, TOKENIZER, InProcessScorer(arithmetic_reward), PARAMS,
            samples_per_prompt=4, max_prompt_tokens=7, seed=1, rollout=2, indices=indices,
        )  # fmt: skip
        return [request.noise_key for request in engine.requests]

    assert keys(PROMPTS) == [(1, 2, i) for i in range(12)]
    assert keys(PROMPTS[:1], [0]) + keys(PROMPTS[1:], [1, 2]) == keys(PROMPTS)
    long = dataclasses.replace(PROMPTS[0], text="<bos> 2 1 * 4 3 * 4 3 =")
    assert keys([long, *PROMPTS[1:]]) == keys(PROMPTS)[4:]


def test_messages_go_through_the_chat_template() -> None:
    turns: tuple[Message, ...] = ({"role": "system", "content": "2 1"}, {"role": "user", "content": "* 4 3"})
    prompt = Prompt("chat", "408", "test", messages=turns)
    batch = collect_with(right_or_wrong, [prompt])
    sample = batch.samples[0]
    assert TOKENIZER.decode(sample.tokens[: sample.prompt_length]) == "<bos> 2 1 * 4 3 ="


def test_prompts_that_are_too_long_are_counted_and_stop_a_run_that_has_no_others() -> None:
    batch = collect_with(right_or_wrong, max_prompt_tokens=6)
    assert batch.groups == []
    counts = batch.counts
    assert (counts.num_prompts, counts.num_prompts_too_long, counts.num_samples) == (3, 3, 0)
    with pytest.raises(RolloutError, match="found 3 prompts, "):
        refuse_if_too_many_dropped(counts, 1.0)
    refuse_if_too_many_dropped(dataclasses.replace(counts, num_prompts_too_long=2), 0.0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"finish_reason": "abort"}, "aborted"),
        (
            {
                "tokens": torch.zeros(0, dtype=torch.int64),
                "rollout_log_probs": torch.zeros(0),
                "loss_mask": torch.zeros(0, dtype=torch.bool),
            },
            "empty_response",
        ),
        ({"rollout_log_probs": torch.full((17,), math.nan)}, "non_finite_log_probs"),
        ({"rollout_log_probs": torch.full((17,), -math.inf)}, "non_finite_log_probs"),
    ],
)
def test_a_faulty_sample_leaves_its_group(fault: dict[str, Any], reason: DropReason) -> None:
    batch = collect_with(faulty([1], **fault))
    assert dropped(batch) == {reason: 1}
    assert [len(group.samples) for group in batch.groups] == [3, 4, 4]
    assert [sample.id[-2:] for sample in batch.groups[0].samples] == ["+0", "+2", "+3"]
    assert batch.counts.num_left_alone == batch.counts.num_dropped_groups == 0
    assert batch.counts.example is not None and batch.counts.example.startswith(
        f"{reason}, sample rollout2/a/0+1:"
    )


def test_a_group_with_one_survivor_goes() -> None:
    batch = collect_with(faulty([4, 5, 7], finish_reason="abort"))
    assert [group.prompt.id for group in batch.groups] == ["a", "c"]
    assert dropped(batch) == {"aborted": 3}
    assert batch.counts.num_dropped_groups == 1 and batch.counts.num_left_alone == 1


def test_evaluation_keeps_groups_of_one() -> None:
    batch = collect_with(faulty([1], finish_reason="abort"), samples_per_prompt=1)
    assert [group.prompt.id for group in batch.groups] == ["a", "c"]
    assert batch.counts.num_dropped_groups == 1 and batch.counts.num_left_alone == 0


def test_evaluation_keeps_the_sound_sample_of_a_faulty_group() -> None:
    batch = collect_with(faulty([4, 5, 7], finish_reason="abort"), smallest_group=1)
    assert [len(group.samples) for group in batch.groups] == [4, 1, 4]
    (kept,) = batch.groups[1].samples
    assert kept.id == "rollout2/b/4+2" and kept.finish_reason == "stop"
    assert batch.counts.num_dropped_groups == batch.counts.num_left_alone == 0


def test_nan_among_the_top_k_is_a_fault_and_minus_infinity_is_not() -> None:
    def script(i: int, request: Request) -> Sample:
        log_probs = torch.full((17, 2), -math.inf if i else math.nan)
        return complete(request, RIGHT, topk=RolloutTopK(torch.zeros(17, 2, dtype=torch.int32), log_probs))

    batch = collect_with(script, params=dataclasses.replace(PARAMS, num_topk_log_probs=2))
    assert dropped(batch) == {"non_finite_log_probs": 1}


def test_routes_are_validated() -> None:
    def script(i: int, request: Request) -> Sample:
        routes = RoutedExperts(torch.zeros(23, 1, 2, dtype=torch.uint8), (0,), 8)
        return complete(request, RIGHT, routed_experts=None if i == 0 else routes)

    def refuse_second(sample: Sample) -> None:
        assert sample.routed_experts is not None
        if sample.id.endswith("+1"):
            raise RoutingReplayError("an expert is named twice")

    params = dataclasses.replace(PARAMS, capture_routes=True)
    batch = collect_with(script, params=params, validate_routes=refuse_second)
    assert dropped(batch) == {"invalid_routes": 4}  # missing once, refused three times
    assert [len(group.samples) for group in batch.groups] == [2, 3, 3]


@pytest.mark.parametrize("unusable", [math.nan, -math.inf, 3e38, -1.7e308, 1.1e18])
def test_a_failing_reward_is_a_fault(unusable: float) -> None:
    def reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        if prompt.id == "a":
            raise KeyError("lost")
        return RewardResult(unusable if prompt.id == "b" else 1.0)

    batch = collect_with(right_or_wrong, reward=reward)
    assert dropped(batch) == {"reward_failed": 8}
    assert [group.prompt.id for group in batch.groups] == ["c"]
    assert (
        batch.counts.example is not None
        and "prompt a: the reward raised KeyError: 'lost'" in batch.counts.example
    )


def test_rewards_see_text_without_special_tokens_and_the_finish_reason() -> None:
    seen: list[tuple[str, FinishReason]] = []

    def reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        seen.append((response, finish_reason))
        return RewardResult(0.0)

    texts = ["w1 # 4 <eos>", "w1 # 4"]
    batch = collect_with(lambda i, r: complete(r, texts[i]), PROMPTS[:1], reward=reward, samples_per_prompt=2)
    assert seen == [("w1 # 4", "stop"), ("w1 # 4", "length")]
    assert batch.counts.num_truncated == 1


def test_counts_add_up_over_ranks() -> None:
    first = collect_with(faulty([1], finish_reason="abort")).counts
    second = collect_with(faulty([4, 5, 7], finish_reason="length"), max_prompt_tokens=7).counts
    names = [field.name for field in dataclasses.fields(EngineCounts)]
    second = dataclasses.replace(second, engine=EngineCounts(*range(len(names))))
    first = dataclasses.replace(first, engine=EngineCounts(*[10] * len(names)))
    totals = first.with_totals(first.to_tensor() + second.to_tensor())
    for field in dataclasses.fields(totals):
        of_each = getattr(first, field.name), getattr(second, field.name)
        if isinstance(of_each[0], int):
            assert getattr(totals, field.name) == sum(of_each), field.name
    assert totals.num_dropped == {
        reason: first.num_dropped[reason] + second.num_dropped[reason] for reason in DROP_REASONS
    }
    assert totals.num_prompts == 6 and totals.num_samples == 24
    assert totals.num_dropped["aborted"] == 1 and totals.num_truncated == 3
    assert totals.example == first.example
    assert first.with_totals(first.to_tensor()) == first


def test_the_list_of_metrics_says_what_each_count_of_the_engine_means() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `engine/")]
    listed = {name.strip(" `").removeprefix("engine/") for cell in first_cells for name in cell.split(",")}
    of_ahead = {"busy_in_training", "requests_in_training"}  # which no engine counts
    assert listed == {name.removeprefix("engine/") for name in EngineCounts().metrics()} | of_ahead


def test_too_many_dropped() -> None:
    counts = collect_with(faulty([1, 6], finish_reason="abort")).counts
    refuse_if_too_many_dropped(counts, 2 / 12)
    with pytest.raises(RolloutError) as error:
        refuse_if_too_many_dropped(counts, 0.01)
    message = str(error.value)
    for part in (
        "2 of 12 samples",
        "2 aborted",
        "at most 1.00%",
        "rollout2/a/0+1",
        "rollout.max_dropped_fraction",
    ):
        assert part in message
    assert "reward" not in message


def test_error_of_a_flaky_reward_names_reward_retries() -> None:
    def at_times(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        raise ConnectionError("the judge is busy")

    counts = collect_with(right_or_wrong, reward=at_times).counts
    with pytest.raises(RolloutError, match=r"the judge is busy.*data\.reward_retries"):
        refuse_if_too_many_dropped(counts, 0.01)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda i, r: complete(r, RIGHT, id="x"), "'x' in place of 'rollout2/a/0\\+0'"),
        (lambda i, r: complete(r, RIGHT, rollout_log_probs=torch.zeros(3)), "'log_probs': 3.*expected 17"),
    ],
)
def test_completions_that_do_not_fit(script: Callable[[int, Request], Sample], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        collect_with(script)


def test_missing_top_k_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"'topk': 0.*expected 17"):
        collect_with(right_or_wrong, params=dataclasses.replace(PARAMS, num_topk_log_probs=4))


def test_samples_are_written_as_text(tmp_path: Path) -> None:
    batch = collect_with(right_or_wrong, PROMPTS[:1], samples_per_prompt=2)
    group = batch.groups[0]
    scored = tuple(
        dataclasses.replace(s, advantage=s.reward - 0.5) for s in group.samples if s.reward is not None
    )
    path = tmp_path / "samples" / "rollout2.jsonl"
    write_samples(path, [dataclasses.replace(group, samples=scored)], TOKENIZER)
    first, second = lines_of(path)
    assert first["prompt"] == "<bos> 2 1 * 4 3 =" and first["response"] == RIGHT
    assert (first["reward"], first["advantage"]) == (1.0, 0.5)
    assert (second["reward"], second["advantage"]) == (0.0, -0.5)
    assert first["prompt_length"] == 7 and first["response_length"] == 17 and first["finish_reason"] == "stop"
    assert list(path.parent.iterdir()) == [path]
