"""Groups of responses to one prompt: requested, sampled, scored, and counted where they were dropped.

Each rank makes the groups of its own share of a rollout, without communicating. The loop sums the counts over
ranks and then calls `refuse_if_too_many_dropped`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import cast

import torch

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.data.prompts.templates import prompt_tokens
from megatron_dppo.environments import (
    EnvironmentFault,
    Environments,
    Episode,
    InProcess,
    Observation,
    SingleTurn,
    Trajectory,
)
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.counts import DROP_REASONS, RolloutCounts
from megatron_dppo.rollout.engine import (
    Completion,
    InterruptibleEngine,
    Request,
    RolloutEngine,
    SamplingParams,
    aborted,
    mask_of,
)
from megatron_dppo.rollout.scoring import Fault, Scorer, Tokenizer, as_text
from megatron_dppo.runtime.jsonl import write_jsonl
from megatron_dppo.types import Prompt, Sample, SampleGroup


@dataclass(frozen=True)
class PromptGroup:
    """A prompt and the responses requested for it: open until each was sampled or given up, then scored."""

    drawn: Drawn
    index: int  # the prompt's place, over all ranks, in the rollout that began it, or trains on it
    requests: tuple[Request, ...]  # those of aborted responses hold what there is of them
    completions: tuple[Completion | None, ...]  # one for each; none while it is to be sampled
    scored: tuple[Sample | Fault, ...] = ()  # of each completion: its sample, or why it cannot be trained on

    @property
    def is_whole(self) -> bool:
        """Whether each response was sampled or given up."""
        return None not in self.completions

    @property
    def answers(self) -> list[tuple[Request, Completion]]:
        """Requests with the responses that were sampled."""
        pairs = zip(self.requests, self.completions, strict=True)
        return [(request, completion) for request, completion in pairs if completion is not None]

    @property
    def missing(self) -> list[Request]:
        """Requests whose responses were not sampled yet."""
        pairs = zip(self.requests, self.completions, strict=True)
        return [request for request, completion in pairs if completion is None]

    @property
    def num_partials(self) -> int:
        """Number of responses that were aborted after some tokens."""
        return sum(request.partial is not None for request in self.missing)

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
        """Whether all rewards are equal, so that no sample learns."""
        return len({sample.reward for sample in self.samples}) == 1


@dataclass(frozen=True)
class GroupMaker:
    """Makes the groups of requests for prompts."""

    tokenizer: Tokenizer
    samples_per_prompt: int
    max_prompt_tokens: int
    seed: int
    environments: Environments = field(default_factory=lambda: InProcess(SingleTurn))

    def begin(self, rollout: int, places: Sequence[tuple[int, Drawn]]) -> list[PromptGroup]:
        """Make groups of requests for prompts and their places in the rollout; prompts too long are dropped.

        A group whose environment does not begin is whole at once, of samples that were given up.
        """
        return list(self._groups(rollout, places))

    def _tokens(self, opening: Observation | EnvironmentFault) -> tuple[int, ...]:
        if isinstance(opening, EnvironmentFault):
            return ()
        return prompt_tokens(self.tokenizer, opening.text, opening.messages)

    def _groups(self, rollout: int, places: Sequence[tuple[int, Drawn]]) -> Iterator[PromptGroup]:
        trajectories = [Trajectory(f"rollout{rollout}/{index}", drawn.prompt) for index, drawn in places]
        for (index, drawn), opening in zip(places, self.environments.reset(trajectories), strict=True):
            fault = opening if isinstance(opening, EnvironmentFault) else None
            tokens = self._tokens(opening)
            if len(tokens) <= self.max_prompt_tokens:
                first_key = (self.seed, rollout, index * self.samples_per_prompt)
                requests = _requests(drawn.prompt, tokens, first_key, self.samples_per_prompt)
                if isinstance(opening, Observation) and opening.messages is not None:
                    requests = [replace(request, is_chat=True) for request in requests]
                completions = [_lost(request, fault) if fault else None for request in requests]
                yield PromptGroup(drawn, index, tuple(requests), tuple(completions))


def sample(
    engine: RolloutEngine, groups: Sequence[PromptGroup], params: SamplingParams, num_wanted: int
) -> list[PromptGroup]:
    """Sample until `num_wanted` groups are whole, and return all groups in their order.

    Raises:
        RolloutError: The engine's completions do not answer the requests one for one.
    """
    requests = [request for group in groups for request in group.missing]
    num_missing = num_wanted - sum(group.is_whole for group in groups)
    if num_missing <= 0 or not requests:
        return list(groups)
    if num_wanted >= len(groups):
        completions = _checked(requests, engine.generate(requests, params), params)
        return _updated(groups, {completion.request_id: completion for completion in completions}, {})
    is_enough = _Enough(groups, num_missing)
    interruptible = cast(InterruptibleEngine, engine)  # checks.sampling_rules demands it
    completions = _checked(requests, interruptible.generate_until(requests, params, is_enough), params)
    finished, partials = dict[str, Completion](), dict[str, Completion]()
    for completion in completions:
        num_tokens = completion.tokens.numel()
        if completion.finish_reason != "abort" or completion.request_id in is_enough.told:
            finished[completion.request_id] = completion
        elif num_tokens >= params.max_response_tokens:  # aborted just after its last token
            finished[completion.request_id] = replace(completion, finish_reason="length")
        elif num_tokens:
            partials[completion.request_id] = completion
    return _updated(groups, finished, partials)


class _Enough:
    """Counts down the groups that are still to become whole; a part of `sample`."""

    def __init__(self, groups: Sequence[PromptGroup], num_missing: int) -> None:
        self.told: set[str] = set()  # requests that were answered, or given up, before it was enough
        self._num_missing = num_missing
        self._group_of = {request.id: at for at, group in enumerate(groups) for request in group.missing}
        self._left = Counter(self._group_of.values())

    def __call__(self, completion: Completion) -> bool:
        self.told.add(completion.request_id)
        group = self._group_of[completion.request_id]
        self._left[group] -= 1
        self._num_missing -= self._left[group] == 0
        return self._num_missing <= 0


def _updated(
    groups: Sequence[PromptGroup], finished: Mapping[str, Completion], partials: Mapping[str, Completion]
) -> list[PromptGroup]:
    """Return the groups with the finished completions, and the partial ones to resume."""

    def update(group: PromptGroup) -> PromptGroup:
        old = zip(group.requests, group.completions, strict=True)
        requests = [replace(r, partial=partials.get(r.id, r.partial)) for r in group.requests]
        completions = [completion or finished.get(request.id) for request, completion in old]
        return replace(group, requests=tuple(requests), completions=tuple(completions))

    return [update(group) for group in groups]


def _lost(request: Request, fault: EnvironmentFault) -> Completion:
    return replace(aborted(request), episode=Episode("", 0, fault=fault.message))


def _requests(
    prompt: Prompt, tokens: tuple[int, ...], first_key: tuple[int, int, int], count: int
) -> list[Request]:
    """Return the requests `<group>+0`, `<group>+1`, ... of one group.

    The group's id holds rollout, prompt and first sample: a prompt may come twice in one rollout. No id begins
    with another, since SGLang aborts all requests whose ids begin with the one that is named.
    """
    seed, rollout, start = first_key
    group, width = f"rollout{rollout}/{prompt.id}/{start}", len(str(count - 1))
    ids = [f"{group}+{k:0{width}d}" for k in range(count)]
    return [Request(id, tokens, (seed, rollout, start + k), prompt=prompt) for k, id in enumerate(ids)]


def _checked(
    requests: Sequence[Request], completions: Sequence[Completion], params: SamplingParams
) -> Sequence[Completion]:
    """Return the completions after checking that they match the requests, with one log-prob per token."""
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
