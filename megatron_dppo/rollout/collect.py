"""From prompts to scored groups of samples: tokenise, sample, judge, and count what was dropped.

Each rank collects its own share of a rollout, without communicating. The loop sums the counts
over ranks and then calls `refuse_if_too_many_dropped`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from megatron_dppo.data.jsonl import write_jsonl
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.counts import DROP_REASONS, RolloutCounts, refuse_if_too_many_dropped
from megatron_dppo.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from megatron_dppo.rollout.judge import Fault, Judge, RouteValidator, Scorer, Tokenizer, as_text
from megatron_dppo.types import Prompt, Sample, SampleGroup

__all__ = [
    "RolloutBatch",
    "RolloutCounts",
    "Tokenizer",
    "collect",
    "refuse_if_too_many_dropped",
    "write_samples",
]


@dataclass(frozen=True)
class RolloutBatch:
    """One rank's share of a rollout. Samples have rewards, and no advantages yet."""

    groups: tuple[SampleGroup, ...]
    counts: RolloutCounts

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group.samples]


def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    scorer: Scorer,
    params: SamplingParams,
    *,
    samples_per_prompt: int,
    max_prompt_tokens: int,
    seed: int,
    rollout: int,
    indices: Sequence[int] | None = None,
    smallest_group: int = 2,
    validate_routes: RouteValidator | None = None,
) -> RolloutBatch:
    """Sample and score `samples_per_prompt` responses to each prompt.

    A sample that cannot be trained on is dropped, counted by reason, and leaves its group. A group left with
    fewer than `smallest_group` samples goes too, unless no more were asked for.

    Args:
        engine: Samples the responses.
        prompts: This rank's share of the rollout.
        tokenizer: Of the model that the engine holds.
        scorer: Scores responses' text; a `RewardPool`.
        params: How to sample.
        samples_per_prompt: Responses to each prompt.
        max_prompt_tokens: Longer prompts are dropped and counted.
        seed: Seeds the sampling noise.
        rollout: Index of this rollout in the run.
        indices: Place of each prompt in the whole rollout, over all ranks; none means 0, 1, 2, ... Noise is
            keyed by it, so it does not depend on the number of ranks.
        smallest_group: Two for training, since one sample has nothing to compare with.
        validate_routes: Raises RoutingReplayError where a sample's captured routes do not fit.

    Raises:
        RolloutError: The engine's completions do not answer the requests one for one.
        RewardError: The reward cannot be loaded, or its workers cannot start.
    """
    asked: list[tuple[int, Prompt]] = []
    requests: list[Request] = []
    places = range(len(prompts)) if indices is None else indices
    for index, prompt in zip(places, prompts, strict=True):
        tokens = _tokenize(tokenizer, prompt)
        if len(tokens) <= max_prompt_tokens:
            asked.append((index, prompt))
            start = index * samples_per_prompt
            requests += _requests(prompt, tokens, (seed, rollout, start), samples_per_prompt)
    completions = _checked(requests, engine.generate(requests, params) if requests else [], params)
    samples = [_sample(*pair) for pair in zip(requests, completions, strict=True)]
    judge = Judge(tokenizer, scorer, params.capture_routes, validate_routes)
    of_samples = [prompt for _, prompt in asked for _ in range(samples_per_prompt)]
    verdicts = judge(list(zip(of_samples, samples, strict=True)))
    judged = [
        _JudgedGroup(index, prompt, verdicts[i * samples_per_prompt : (i + 1) * samples_per_prompt])
        for i, (index, prompt) in enumerate(asked)
    ]
    kept = [group for group in judged if len(group.samples) >= min(smallest_group, samples_per_prompt)]
    counts = _count(len(prompts), samples, judged, kept)
    return RolloutBatch(tuple(SampleGroup(group.prompt, group.samples, group.index) for group in kept), counts)


def write_samples(path: Path, batch: RolloutBatch, tokenizer: Tokenizer) -> None:
    """Write the samples as text, one JSON object per line, whole or not at all."""
    rows = (_readable(group.prompt, sample, tokenizer) for group in batch.groups for sample in group.samples)
    write_jsonl(path, rows)


@dataclass(frozen=True)
class _JudgedGroup:
    index: int
    prompt: Prompt
    verdicts: Sequence[Sample | Fault]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(verdict for verdict in self.verdicts if isinstance(verdict, Sample))

    @property
    def faults(self) -> list[Fault]:
        return [verdict for verdict in self.verdicts if isinstance(verdict, Fault)]


def _count(
    num_prompts: int, samples: Sequence[Sample], judged: Sequence[_JudgedGroup], kept: Sequence[_JudgedGroup]
) -> RolloutCounts:
    faults = [fault for group in judged for fault in group.faults]
    num_kept = sum(len(group.samples) for group in kept)
    return RolloutCounts(
        num_prompts=num_prompts,
        num_prompts_too_long=num_prompts - len(judged),
        num_samples=len(samples),
        num_truncated=sum(sample.finish_reason == "length" for sample in samples),
        num_response_tokens=sum(sample.response_length for sample in samples),
        num_dropped_groups=len(judged) - len(kept),
        num_left_alone=len(samples) - len(faults) - num_kept,
        num_dropped={reason: sum(fault.reason == reason for fault in faults) for reason in DROP_REASONS},
        example=str(faults[0]) if faults else None,
    )


def _tokenize(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    if prompt.text is not None:
        tokens = tokenizer.encode(prompt.text, add_special_tokens=True)
    else:
        assert prompt.messages is not None
        tokens = tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return tuple(cast(list[int], tokens))


def _requests(
    prompt: Prompt, tokens: tuple[int, ...], first_key: tuple[int, int, int], count: int
) -> list[Request]:
    """Requests `<group>+0`, `<group>+1`, ... of one group.

    The group's id holds rollout, prompt and first sample: a prompt may come twice in one rollout.
    """
    seed, rollout, start = first_key
    group = f"rollout{rollout}/{prompt.id}/{start}"
    return [Request(f"{group}+{k}", tokens, (seed, rollout, start + k)) for k in range(count)]


def _checked(
    requests: Sequence[Request], completions: Sequence[Completion], params: SamplingParams
) -> Sequence[Completion]:
    """The completions, once they are known to answer the requests in order, with one log-prob per token."""
    wanted, given = [r.id for r in requests], [c.request_id for c in completions]
    if wanted != given:
        first = next((pair for pair in zip(wanted, given, strict=False) if pair[0] != pair[1]), None)
        found = f"{first[1]!r} where {first[0]!r} was due" if first else f"{len(given)} of them"
        raise RolloutError(
            f"engine's completions: found {found}; expected one for each of {len(wanted)} requests, in order. "
            "This is a fault of the engine: report it."
        )
    for completion in completions:
        num_tokens = completion.tokens.numel()
        num_rows = {"log_probs": completion.log_probs.numel()}
        if params.num_topk_log_probs:
            num_rows["topk"] = completion.topk.ids.shape[0] if completion.topk is not None else 0
        if any(count != num_tokens for count in num_rows.values()):
            raise RolloutError(
                f"completion {completion.request_id}: found rows {num_rows}; expected {num_tokens}, one per "
                "token. This is a fault of the engine: report it."
            )
    return completions


def _sample(request: Request, completion: Completion) -> Sample:
    prompt = torch.tensor(request.prompt_tokens, dtype=torch.int64)
    return Sample(
        id=request.id,
        group_id=request.id.rpartition("+")[0],
        tokens=torch.cat([prompt, completion.tokens]),
        prompt_length=len(prompt),
        loss_mask=torch.ones(completion.tokens.numel(), dtype=torch.bool),
        rollout_log_probs=completion.log_probs,
        finish_reason=completion.finish_reason,
        topk=completion.topk,
        routed_experts=completion.routed_experts,
        weight_versions=completion.weight_versions,
    )


def _readable(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> dict[str, object]:
    question, response = sample.tokens.tensor_split([sample.prompt_length])
    return {
        "id": sample.id,
        "prompt_id": prompt.id,
        "prompt": as_text(tokenizer, question, has_special_tokens=True),
        "response": as_text(tokenizer, response, has_special_tokens=True),
        "answer": prompt.answer,
        "reward": sample.reward,
        "reward_info": dict(sample.reward_info),
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
    }
