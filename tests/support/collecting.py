"""Scored groups of samples from prompts in one call, without a run around it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from megatron_dppo.agents.agents import Converse
from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import Ask, Request, RolloutEngine, SamplingParams, Session
from megatron_dppo.engines.batch_session import batch_session
from megatron_dppo.environments import Environments, InProcess, SingleTurn
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.groups import GroupMaker, usable_groups
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scoring import OverlongShaping, RewardScorer, RouteValidator, Scorer, Tokenizer
from megatron_dppo.runtime.concurrency import all_of, run_loop
from megatron_dppo.types import Prompt, Sample, SampleGroup


class Collected(NamedTuple):
    """One rank's share of a rollout."""

    groups: list[SampleGroup]
    counts: RolloutCounts

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group.samples]


class InBatches:
    """Base of an engine of a test that samples in batches."""

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[Session]:
        return batch_session(lambda requests, params: self.generate(requests, params))

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        raise NotImplementedError

    def load_weights(self, weights: Any, version: int) -> str:
        raise NotImplementedError


def sample_until(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    is_enough: Callable[[Sample], bool],
) -> list[Sample]:
    """A completion for each request of a session that is held once it is enough."""

    async def sample() -> list[Sample]:
        async with engine.session() as session:

            async def run(request: Request) -> Sample:
                completion = await session.ask(request, params)
                if not session.is_held and is_enough(completion):
                    await session.hold()
                return completion

            return await all_of(map(run, requests))

    return run_loop(sample())


async def ask_once(request: Request, params: SamplingParams, ask: Ask) -> Sample:
    """A response without a conversation around it."""
    return await ask(request, params)


class MultiTurn:
    """Conversations that an engine samples."""

    def __init__(
        self, engine: Any, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits
    ) -> None:
        self.engine, self.weight_version = engine, engine.weight_version
        self.converse: Converse = Conversations(environments, tokenizer, limits).run

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """One conversation for each request, in one session."""

        async def sample() -> list[Sample]:
            async with self.engine.session(may_be_held=False) as session:

                async def run(request: Request) -> Sample:
                    with session.conversation(request.id):
                        return await self.converse(request, params, session.ask)

                return await all_of(map(run, requests))

        return run_loop(sample())

    def sampler(self, scorer: Scorer, params: SamplingParams) -> GroupSampler:
        return GroupSampler(self.engine.session, self.converse, scorer, params)


def collect(
    engine: RolloutEngine | MultiTurn,
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
    fewer than `smallest_group` samples is dropped too, unless no more were requested.

    Args:
        engine: Samples the responses.
        prompts: This rank's share of the rollout.
        tokenizer: The tokenizer of the engine's model.
        scorer: Scores responses' text; a `RewardPool`.
        params: How to sample.
        samples_per_prompt: Responses to each prompt.
        max_prompt_tokens: Longer prompts are dropped and counted.
        seed: Seeds the sampling noise.
        rollout: Index of this rollout in the run.
        indices: Place of each prompt in the whole rollout, over all ranks; none means 0, 1, 2, ... Noise is
            keyed by it, so it does not depend on the number of ranks.
        smallest_group: Two for training, since one sample has nothing to compare with.
        validate_routes: Raises RoutingReplayError if a sample's captured routes do not fit.
        environments: Environments that open the conversations. `None` means that the prompts open them.
        overlong: Penalty of long responses, or `None`.

    Raises:
        RolloutError: The engine's completions do not match the requests one to one.
        RewardError: The reward cannot be loaded, or its workers cannot start.
    """
    places = range(len(prompts)) if indices is None else indices
    maker = GroupMaker(
        tokenizer, samples_per_prompt, max_prompt_tokens, seed, environments or InProcess(SingleTurn)
    )
    sample_scorer = Scorer(tokenizer, scorer, params.capture_routes, validate_routes, overlong)
    sampler = (
        engine.sampler(sample_scorer, params)
        if isinstance(engine, MultiTurn)
        else GroupSampler(engine.session, ask_once, sample_scorer, params)
    )
    drawn = [(place, Drawn(place, prompt)) for place, prompt in zip(places, prompts, strict=True)]
    scored = maker.begin(rollout, drawn)
    sampler.sample(scored)
    smallest = min(smallest_group, samples_per_prompt)
    num_too_long = len(prompts) - len(scored)
    version = engine.weight_version
    return Collected(*usable_groups(scored, [], smallest, num_too_long=num_too_long, weight_version=version))
