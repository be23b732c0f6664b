"""Scored groups of samples from prompts in one call, without a run around it."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_dppo.engines.base import RolloutEngine, SamplingParams
from megatron_dppo.environments import Environments, InProcess, SingleTurn
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.group_sampling import answers
from megatron_dppo.rollout.groups import GroupMaker, usable_groups
from megatron_dppo.rollout.scoring import OverlongShaping, RewardScorer, RouteValidator, Scorer, Tokenizer
from megatron_dppo.types import Prompt, Sample, SampleGroup


class Collected(NamedTuple):
    """One rank's share of a rollout."""

    groups: list[SampleGroup]
    counts: RolloutCounts

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group.samples]


def collect(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    scorer: RewardScorer,
    params: SamplingParams,
    *,
    samples_per_prompt: int,
    max_prompt_tokens: int,
    seed: int,
    rollout: int,
    indices: Sequence[int] | None = None,
    smallest_group: int = 2,
    validate_routes: RouteValidator | None = None,
    environments: Environments | None = None,
    overlong: OverlongShaping | None = None,
) -> Collected:
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
        environments: Say how conversations open; none: the prompts themselves do.
        overlong: Lowers the reward of long responses; none: nothing does.

    Raises:
        RolloutError: The engine's completions do not answer the requests one for one.
        RewardError: The reward cannot be loaded, or its workers cannot start.
    """
    places = range(len(prompts)) if indices is None else indices
    maker = GroupMaker(
        tokenizer, samples_per_prompt, max_prompt_tokens, seed, environments or InProcess(SingleTurn)
    )
    sample_scorer = Scorer(tokenizer, scorer, params.capture_routes, validate_routes, overlong)
    scored = answers(engine, maker, sample_scorer, params, rollout, list(zip(places, prompts, strict=True)))
    smallest = min(smallest_group, samples_per_prompt)
    num_too_long = len(prompts) - len(scored)
    version = engine.weight_version
    return Collected(*usable_groups(scored, [], smallest, num_too_long=num_too_long, weight_version=version))
