"""Collects scored groups of samples from prompts: tokenise, sample, score, and count what was dropped.

Each rank collects its own share of a rollout, without communicating. The loop sums the counts
over ranks and then calls `refuse_if_too_many_dropped`.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.rollout.counts import DROP_REASONS, RolloutCounts
from megatron_dppo.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, sample
from megatron_dppo.rollout.partials import mask_of
from megatron_dppo.rollout.scoring import Scorer, Tokenizer, as_text
from megatron_dppo.runtime.jsonl import write_jsonl
from megatron_dppo.types import Prompt, Sample, SampleGroup


def answers(
    engine: RolloutEngine,
    maker: GroupMaker,
    scorer: Scorer,
    params: SamplingParams,
    rollout: int,
    places: Sequence[tuple[int, Prompt]],
) -> list[PromptGroup]:
    """Sample and score responses to prompts; prompts that are too long are dropped.

    Args:
        engine: Samples the responses.
        maker: Says how many, and keys their noise.
        scorer: Scores them.
        params: How to sample.
        rollout: Index of the rollout, or a number of an evaluation, that keys the noise.
        places: The prompts, each with its place among those of all ranks.
    """
    groups = maker.begin(rollout, [(index, Drawn(index, prompt)) for index, prompt in places])
    return score_groups(scorer, sample(engine, groups, params, len(groups)))


def write_samples(path: Path, groups: Sequence[SampleGroup], tokenizer: Tokenizer) -> None:
    """Write the samples as text, one JSON object per line, whole or not at all."""
    rows = (_readable(group.prompt, sample, tokenizer) for group in groups for sample in group.samples)
    write_jsonl(path, rows)


def score_groups(scorer: Scorer, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """Score whole groups, all at once."""
    samples = [
        (group.drawn.prompt, _sample(request, completion), completion.episode)
        for group in groups
        for request, completion in group.answers
    ]
    scored = iter(scorer(samples))
    return [replace(group, scored=tuple(islice(scored, len(group.answers)))) for group in groups]


def usable_groups(
    scored: Sequence[PromptGroup],
    replaced: Sequence[PromptGroup],
    smallest_group: int,
    *,
    num_too_long: int,
    weight_version: int,
    rest: Sequence[PromptGroup] = (),
    keeps_rest: bool = True,
) -> tuple[list[SampleGroup], RolloutCounts]:
    """Return the groups to train on, without advantages yet, and counts of everything that was sampled.

    Args:
        scored: Groups to train on, once they are large enough.
        replaced: Those in whose place others of them came.
        smallest_group: Smaller ones are left out.
        num_too_long: Prompts that were not asked for.
        weight_version: Of the weights that sample now.
        rest: Groups that were begun and are not whole, or not needed.
        keeps_rest: Whether the next rollout goes on with them.
    """
    kept = [group for group in scored if len(group.samples) >= smallest_group]
    everything = [*scored, *replaced]
    answers = [answer for group in everything for answer in group.answers]
    faults = [fault for group in everything for fault in group.faults]
    num_partials = sum(group.num_partials for group in rest)
    counts = RolloutCounts(
        num_prompts=len(everything) + num_too_long,
        num_prompts_too_long=num_too_long,
        num_samples=len(answers),
        num_truncated=sum(completion.finish_reason == "length" for _, completion in answers),
        num_turns=sum(completion.episode.num_turns if completion.episode else 1 for _, completion in answers),
        num_response_tokens=sum(completion.tokens.numel() for _, completion in answers),
        num_old_tokens=sum(_num_old_tokens(completion, weight_version) for _, completion in answers),
        num_requeued=sum(completion.num_moves for _, completion in answers),
        num_retractions=sum(completion.num_retractions for _, completion in answers),
        num_continued=sum(request.partial is not None for request, _ in answers),
        num_kept_partials=num_partials if keeps_rest else 0,
        num_discarded_partials=0 if keeps_rest else num_partials,
        num_replaced_groups=len(replaced),
        num_dropped_groups=len(scored) - len(kept),
        num_left_alone=sum(len(group.samples) for group in scored) - sum(len(group.samples) for group in kept),
        num_dropped={reason: sum(fault.reason == reason for fault in faults) for reason in DROP_REASONS},
        example=str(faults[0]) if faults else None,
    )
    return [SampleGroup(group.drawn.prompt, group.samples, group.index) for group in kept], counts


def _num_old_tokens(completion: Completion, weight_version: int) -> int:
    return sum(span.stop - span.start for span in completion.weight_versions if span.version != weight_version)


def _sample(request: Request, completion: Completion) -> Sample:
    prompt = torch.tensor(request.prompt_tokens, dtype=torch.int64)
    return Sample(
        id=request.id,
        group_id=request.id.rpartition("+")[0],
        tokens=torch.cat([prompt, completion.tokens]),
        prompt_length=len(prompt),
        loss_mask=mask_of(completion),
        rollout_log_probs=completion.log_probs,
        finish_reason=completion.finish_reason,
        topk=completion.topk,
        routed_experts=completion.routed_experts,
        weight_versions=completion.weight_versions,
        num_retractions=completion.num_retractions,
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
