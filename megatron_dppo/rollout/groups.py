"""Groups of responses to one prompt: their requests, sampling, scoring, and counts of what was dropped.

Each rank makes the groups of its share of a rollout, without communication. The loop sums the counts over
ranks and then calls `refuse_if_too_many_dropped`.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megatron_dppo.algorithms import have_equal_rewards
from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.data.prompts.templates import prompt_tokens
from megatron_dppo.engines.base import (
    Completion,
    Request,
    SamplingParams,
    Session,
    give_up,
    mask_of,
)
from megatron_dppo.environments import (
    EnvironmentFault,
    Environments,
    Episode,
    InProcess,
    Observation,
    SingleTurn,
    Trajectory,
)
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rollout.conversations import Ask
from megatron_dppo.rollout.counts import DROP_REASONS, RolloutCounts
from megatron_dppo.rollout.scoring import Fault, Scorer, Tokenizer, as_text
from megatron_dppo.runtime.concurrency import all_of, run_loop
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.types import Prompt, Sample, SampleGroup

OpenSession = Callable[..., AbstractAsyncContextManager[Session]]
"""Opens a session; see `RolloutEngine.session`."""

Converse = Callable[[Request, SamplingParams, Ask], Awaitable[Completion]]
"""Samples one trajectory with a function that samples its turns; see `Conversations.run`."""


@dataclass(eq=False)
class PromptGroup:
    """A prompt and its requested responses: open until each is sampled or given up, and scored."""

    drawn: Drawn
    index: int  # the prompt's index, over all ranks, in the rollout that began it or trains on it
    requests: list[Request]  # an aborted response is the `partial` of its request
    completions: list[Completion | None]  # one per request; None until it is sampled
    scored: list[Sample | Fault | None]  # one per request: the sample, or why it cannot be trained on
    born: int | None = None  # version of the first token's weights; None before it, and in a rollout of its own
    has_tokens: bool = False  # while it has no tokens and is not whole, a push resets `born`

    @property
    def is_sampled(self) -> bool:
        """Whether every response is sampled or given up."""
        return None not in self.completions

    @property
    def is_whole(self) -> bool:
        """Whether every response is sampled or given up, and scored."""
        return None not in self.scored

    @property
    def answers(self) -> list[tuple[Request, Completion]]:
        """Requests whose responses are sampled, with their completions."""
        pairs = zip(self.requests, self.completions, strict=True)
        return [(request, completion) for request, completion in pairs if completion is not None]

    @property
    def missing(self) -> list[int]:
        """Indices of the responses that are not sampled and scored yet."""
        return [index for index, scored in enumerate(self.scored) if scored is None]

    @property
    def num_partials(self) -> int:
        """Number of responses that were aborted after some tokens."""
        return sum(self.requests[index].partial is not None for index in self.missing)

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples that can be trained on."""
        return tuple(each for each in self.scored if isinstance(each, Sample))

    @property
    def faults(self) -> list[Fault]:
        """Faults of the samples that cannot be trained on."""
        return [each for each in self.scored if isinstance(each, Fault)]

    @property
    def has_zero_variance(self) -> bool:
        """Whether all rewards are equal up to rounding, so that no sample learns; False without rewards."""
        rewards = [float(sample.reward or 0.0) for sample in self.samples]
        return bool(rewards) and have_equal_rewards(rewards)


@dataclass(frozen=True)
class GroupMaker:
    """Makes the groups of requests for prompts."""

    tokenizer: Tokenizer
    samples_per_prompt: int
    max_prompt_tokens: int
    seed: int
    environments: Environments = field(default_factory=lambda: InProcess(SingleTurn))

    def begin(self, rollout: int | None, places: Sequence[tuple[int, Drawn]]) -> list[PromptGroup]:
        """Make groups of requests for prompts; drop prompts that are too long.

        If an environment's `reset` fails, its group is whole at once, and all its responses count as given up.

        Args:
            rollout: Index of the rollout; None if the groups begin before it is known which rollout takes them.
            places: Prompts with their index in the rollout, or in the stream if there is no rollout yet.
        """
        begun = "place" if rollout is None else f"rollout{rollout}/"
        trajectories = [Trajectory(f"{begun}{index}", drawn.prompt) for index, drawn in places]
        openings = self.environments.reset(trajectories)
        groups = list[PromptGroup]()
        for (index, drawn), trajectory, opening in zip(places, trajectories, openings, strict=True):
            start = index * self.samples_per_prompt
            # The first sample's number is part of the name, because a prompt may occur twice in one rollout.
            name = trajectory.id if rollout is None else f"{begun}{drawn.prompt.id}/{start}"
            tokens = self._tokens(drawn.prompt, opening)
            if len(tokens) > self.max_prompt_tokens:
                continue
            is_chat = isinstance(opening, Observation) and opening.messages is not None
            first_key = (self.seed, rollout or 0, start)
            requests = _requests(
                name, drawn.prompt, tokens, first_key, self.samples_per_prompt, is_chat=is_chat
            )
            fault = opening if isinstance(opening, EnvironmentFault) else None
            completions = [_lost(request, fault) if fault else None for request in requests]
            groups.append(PromptGroup(drawn, index, requests, completions, [None] * len(requests)))
        return groups

    def _tokens(self, prompt: Prompt, opening: Observation | EnvironmentFault) -> tuple[int, ...]:
        if isinstance(opening, EnvironmentFault):
            return ()
        options = (prompt.tools, prompt.template_arguments)
        return prompt_tokens(self.tokenizer, opening.text, opening.messages, *options)


@dataclass(frozen=True)
class GroupSampler:
    """Samples the responses of groups with an engine's sessions. It keeps no state between calls."""

    open_session: OpenSession  # opens a session that samples the turns
    converse: Converse  # samples one response
    scorer: Scorer
    params: SamplingParams  # of every response

    def sample(self, groups: Sequence[PromptGroup], num_wanted: int | None = None) -> None:
        """Sample and score the missing responses of groups, until `num_wanted` groups are whole (None: all).

        The other groups keep what they have: an aborted response is the `partial` of its request.

        Raises:
            RolloutError: The engine raised it, or a completion does not fit its request.
            ServerError: Servers gave no response to any request.
            RewardError: The scorer raised it.
        """
        num_wanted = len(groups) if num_wanted is None else num_wanted
        if num_wanted > sum(group.is_whole for group in groups):
            run_loop(self._sample(groups, num_wanted))

    async def respond(self, group: PromptGroup, index: int, ask: Ask) -> Completion:
        """Sample one response of a group. `keep` must get it, unless it is to be resumed."""
        request = group.requests[index]
        return _check(request, await self.converse(request, self.params, ask), self.params)

    async def keep(self, group: PromptGroup, index: int, completion: Completion) -> None:
        """Add a response that has ended to its group, and score it."""
        request = group.requests[index]
        group.completions[index] = completion
        assert request.prompt is not None, "requests of groups name their prompts"
        sample = sample_of(request, completion)
        group.scored[index] = await self.scorer.score(request.prompt, sample, completion.episode)

    async def _sample(self, groups: Sequence[PromptGroup], num_wanted: int) -> None:
        missing = [(group, index) for group in groups for index in group.missing]
        asked = [(group, index) for group, index in missing if group.completions[index] is None]
        for group, index in missing:
            if (given_up := group.completions[index]) is not None:  # its environment could not begin
                await self.keep(group, index, given_up)
        if not asked:
            return
        async with self.open_session(may_be_held=num_wanted < len(groups)) as session:

            async def work(group: PromptGroup, index: int) -> None:
                completion = await self._respond(group, index, session)
                if completion is None:
                    return
                group.completions[index] = completion
                is_enough = sum(each.is_sampled for each in groups) >= num_wanted
                if is_enough and num_wanted < len(groups) and not session.is_held:
                    await session.hold()
                await self.keep(group, index, completion)

            await all_of(work(*each) for each in asked)
            lost = [error for error in session.errors.values() if isinstance(error, ServerError)]
        if lost and len(lost) == len(asked):
            raise lost[0]

    async def _respond(self, group: PromptGroup, index: int, session: Session) -> Completion | None:
        """Sample a response; None if a hold interrupted it, and its request keeps its tokens."""
        request = group.requests[index]
        with session.conversation(request.id):
            completion = await self.respond(group, index, session.ask)
        is_interrupted = session.is_held and request.id not in session.errors
        if completion.finish_reason != "abort" or not is_interrupted:
            return completion
        if completion.tokens.numel() >= self.params.max_response_tokens:  # aborted just after its last token
            return replace(completion, finish_reason="length")
        if completion.tokens.numel():
            group.requests[index] = replace(request, partial=completion)
        return None


def sample_of(request: Request, completion: Completion) -> Sample:
    """Return the sample of a response, without a reward."""
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


def write_samples(path: Path, groups: Sequence[SampleGroup], tokenizer: Tokenizer) -> None:
    """Write the samples as text, one JSON object per line. The file is either complete or absent."""
    rows = (_readable(group.prompt, sample, tokenizer) for group in groups for sample in group.samples)
    write_jsonl(path, rows)


def usable_groups(
    scored: Sequence[PromptGroup],
    replaced: Sequence[PromptGroup],
    smallest_group: int,
    *,
    num_too_long: int,
    weight_version: int,
    rest: Sequence[PromptGroup] = (),
) -> tuple[list[SampleGroup], RolloutCounts]:
    """Return the groups to train on, without advantages yet, and counts of everything that was sampled.

    Args:
        scored: Groups to train on, if they are large enough.
        replaced: Groups with equal rewards that groups of `scored` have replaced.
        smallest_group: Minimum number of sound samples of a group.
        num_too_long: Number of prompts that were too long to sample.
        weight_version: Version of the engine's weights.
        rest: Unfinished groups that are dropped, because enough others were whole before.
    """
    kept = [group for group in scored if len(group.samples) >= smallest_group]
    everything = [*scored, *replaced]
    answers = [answer for group in everything for answer in group.answers]
    faults = [fault for group in everything for fault in group.faults]
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
        num_discarded_partials=sum(group.num_partials for group in rest),
        num_replaced_groups=len(replaced),
        num_dropped_groups=len(scored) - len(kept),
        num_left_alone=sum(len(group.samples) for group in scored) - sum(len(group.samples) for group in kept),
        num_dropped={reason: sum(fault.reason == reason for fault in faults) for reason in DROP_REASONS},
        example=str(faults[0]) if faults else None,
    )
    return [SampleGroup(group.drawn.prompt, group.samples, group.index) for group in kept], counts


def _num_old_tokens(completion: Completion, weight_version: int) -> int:
    return sum(span.stop - span.start for span in completion.weight_versions if span.version != weight_version)


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


def _lost(request: Request, fault: EnvironmentFault) -> Completion:
    return replace(give_up(request), episode=Episode("", 0, fault=fault.message))


def _requests(
    name: str,
    prompt: Prompt,
    tokens: tuple[int, ...],
    first_key: tuple[int, int, int],
    count: int,
    *,
    is_chat: bool,
) -> list[Request]:
    """Return the requests `<name>+0`, `<name>+1`, ... of one group.

    No id is a prefix of another one, because SGLang aborts all requests with ids that begin with a given id.
    """
    seed, rollout, start = first_key
    ids = [f"{name}+{k:0{len(str(count - 1))}d}" for k in range(count)]
    keys = [(seed, rollout, start + k) for k in range(count)]
    return [Request(id, tokens, key, prompt=prompt, is_chat=is_chat) for id, key in zip(ids, keys, strict=True)]


def _check(request: Request, completion: Completion, params: SamplingParams) -> Completion:
    """Return a completion after checking that it answers the request, with one log-prob per token."""
    if completion.request_id != request.id:
        raise RolloutError(
            f"engine's completions: found {completion.request_id!r} in place of {request.id!r}; expected one "
            "for each request, in order. This is a fault of the engine: report it."
        )
    num_tokens = completion.tokens.numel()
    num_rows = {"log_probs": completion.log_probs.numel()}
    if params.num_topk_log_probs:
        num_rows["topk"] = completion.topk.ids.shape[0] if completion.topk is not None else 0
    if any(count != num_tokens for count in num_rows.values()):
        raise RolloutError(
            f"completion {completion.request_id}: found rows {num_rows}; expected {num_tokens}, one per "
            "token. This is a fault of the engine: report it."
        )
    return completion
