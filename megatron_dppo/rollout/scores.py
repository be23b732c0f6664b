"""Computes the scores of an evaluation: pass@k and means over the responses to each prompt."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import comb, inf

import numpy as np

from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.counts import DropReason, error_of_drops
from megatron_dppo.rollout.groups import PromptGroup

_CORRECT_ABOVE = 0.5  # separates wrong from correct for rewards of 0 and 1, and of -1 and 1
_BLOCK, _NUM_BLOCKS = 100, 20  # resamples in memory at once, and number of these blocks
_INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class PromptScore:
    """Scores of the responses to one prompt. A dropped response has no reward here: see `worst_reward`."""

    index: int  # the prompt's index in its set
    num_samples: int  # responses that count: all requested ones, or n if the prompt is too long to sample
    num_generated: int  # responses that the engine returned
    num_dropped: int  # responses without a reward, of num_samples
    num_correct: int
    num_truncated: int
    num_tokens: int
    total_reward: float  # sum over responses with a reward
    lowest_reward: float = inf  # minimum over responses with a reward; infinity without any
    num_faults: Mapping[DropReason, int] = field(
        default_factory=dict[DropReason, int]
    )  # why responses were dropped
    example: str | None = None  # the first of these faults, in words


def is_correct(reward: float) -> bool:
    """Return whether a response counts as correct in pass@k: its reward is nearer to 1 than to 0."""
    return reward > _CORRECT_ABOVE


def score_of(group: PromptGroup) -> PromptScore:
    """Return the score of one prompt's responses."""
    rewards = [float(sample.reward or 0.0) for sample in group.samples]
    faults = group.faults
    sampled = group.sampled
    return PromptScore(
        index=group.index,
        num_samples=len(sampled),
        num_generated=len(sampled),
        num_dropped=len(faults),
        num_correct=sum(map(is_correct, rewards)),
        num_truncated=sum(each.finish_reason == "length" for each in sampled),
        num_tokens=sum(each.response_length for each in sampled),
        total_reward=sum(rewards),
        lowest_reward=min(rewards, default=inf),
        num_faults=Counter(fault.reason for fault in faults),
        example=str(faults[0]) if faults else None,
    )


def not_asked(index: int, num_samples: int) -> PromptScore:
    """Return the score of a prompt that is too long to sample: every response counts as dropped."""
    return PromptScore(index, num_samples, 0, num_samples, 0, 0, 0, 0.0)


def pass_at(k: int, num_samples: int, num_correct: int) -> float:
    """Return the probability that at least one of k responses, drawn from n without replacement, is correct.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), Eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    assert 1 <= k <= num_samples, "checks.run_rules refuses others"
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def powers_of_two(up_to: int) -> tuple[int, ...]:
    """Return the powers of two 1, 2, 4, ... up to a number."""
    return tuple(1 << exponent for exponent in range(up_to.bit_length()))


def worst_reward(scores: Sequence[PromptScore]) -> float:
    """Return the reward that each dropped response of a set earns: its lowest reward, and at most 0.

    So a dropped response never gives a higher mean than a wrong response would.
    """
    return min([0.0, *(score.lowest_reward for score in scores)])


def refuse_if_too_many_dropped(
    name: str, scores: Sequence[PromptScore], max_fraction: float, refusals: Mapping[str, int]
) -> None:
    """Raise if too many responses of a set were dropped, or if all its prompts were too long.

    Prompts that are too long are a property of the data and do not count as dropped here.

    Args:
        name: Name of the set.
        scores: Scores of all its prompts, over all ranks.
        max_fraction: Largest accepted fraction of the responses that the engine returned.
        refusals: Responses that were refused, by the server's URL, over all sets and ranks.
    """
    num_generated = sum(score.num_generated for score in scores)
    if num_generated == 0:
        raise RolloutError(
            f"evaluation.sets.{name}: found {len(scores)} prompts, all longer than data.max_prompt_tokens; "
            "expected some to sample from. Raise the limit, or shorten the prompts."
        )
    num_faults = sum((Counter(score.num_faults) for score in scores), Counter[DropReason]())
    if (num_dropped := num_faults.total()) <= max_fraction * num_generated:
        return
    by_reason = ", ".join(f"{count} {reason}" for reason, count in sorted(num_faults.items()))
    example = next(score.example for score in scores if score.example is not None)
    found = (
        f"evaluation.sets.{name}: found {num_dropped} of {num_generated} responses dropped ({by_reason}); "
        f"expected at most {max_fraction:.2%}. First of them: {example}."
    )
    raise error_of_drops(found, num_faults, max_fraction * num_generated, refusals)


def interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean over problems.

    Args:
        values: One value per problem, at least one.
        seed: Seed of the resampling; the same values and seed give the same bits.
    """
    known, generator = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    blocks = (generator.integers(len(known), size=(_BLOCK, len(known))) for _ in range(_NUM_BLOCKS))
    low, high = np.percentile([known[block].mean(axis=1) for block in blocks], _INTERVAL)
    return float(low), float(high)


def metric_names(name: str, samples_per_prompt: int, pass_at: Sequence[int]) -> list[str]:
    """Return the names of a set's metrics in reading order; the first is the score."""
    average = f"avg_at_{samples_per_prompt}"
    of_pass = [f"pass_at_{k}" for k in pass_at]
    others = ["truncated_fraction", "response_length_mean", "dropped"]
    return [f"eval/{name}/{each}" for each in (average, f"{average}_low", f"{average}_high", *of_pass, *others)]


def set_metrics(
    name: str, scores: Sequence[PromptScore], ks: Sequence[int], *, samples_per_prompt: int, seed: int
) -> dict[str, float]:
    """Return the metrics of a set.

    Args:
        name: Name of the set.
        scores: Scores of all its prompts, over all ranks, in the order of the prompts. With this order the
            number of ranks does not change a bit.
        ks: Values of k for pass@k.
        samples_per_prompt: n of avg@n.
        seed: Seed of the intervals.
    """
    num_generated = max(sum(score.num_generated for score in scores), 1)
    worst = worst_reward(scores)
    averages = [(score.total_reward + worst * score.num_dropped) / score.num_samples for score in scores]
    low, high = interval(averages, seed)
    values = [
        float(np.mean(averages)),
        low,
        high,
        *(float(np.mean([pass_at(k, score.num_samples, score.num_correct) for score in scores])) for k in ks),
        sum(score.num_truncated for score in scores) / num_generated,
        sum(score.num_tokens for score in scores) / num_generated,
        float(sum(score.num_dropped for score in scores)),
    ]
    return dict(zip(metric_names(name, samples_per_prompt, ks), values, strict=True))


def over_ranks(gathered: Sequence[Mapping[str, Sequence[PromptScore]]]) -> dict[str, list[PromptScore]]:
    """Merge the ranks' scores of each set, in prompt order."""
    names = gathered[0]
    return {
        name: sorted(chain.from_iterable(own[name] for own in gathered), key=lambda score: score.index)
        for name in names
    }
