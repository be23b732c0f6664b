"""Samples groups of responses. Scores each response when it ends, or all responses of a batch together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import (
    Completion,
    HasEnded,
    IsEnough,
    Request,
    RolloutEngine,
    SamplingParams,
    TrajectoryEngine,
    mask_of,
)
from megatron_dppo.environments import Episode
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup
from megatron_dppo.rollout.scoring import Fault, Scorer
from megatron_dppo.types import Prompt, Sample


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
        engine: Engine that samples the responses.
        maker: Group maker, which sets the number of responses per prompt and their noise keys.
        scorer: Scorer of the responses.
        params: Sampling parameters.
        rollout: Index of the rollout, or a number for an evaluation; part of the noise key.
        places: Prompts of this rank, each with its index among the prompts of all ranks.
    """
    groups = maker.begin(rollout, [(index, Drawn(index, prompt)) for index, prompt in places])
    return score_groups(scorer, sample(engine, groups, params, len(groups), scorer))


def sample(
    engine: RolloutEngine,
    groups: Sequence[PromptGroup],
    params: SamplingParams,
    num_wanted: int,
    scorer: Scorer,
) -> list[PromptGroup]:
    """Sample until `num_wanted` groups are whole, and return all groups in their order.

    If the engine reports when a response ends, the response is scored at once, while others are sampled.
    `score_groups` scores the rest.

    Raises:
        RolloutError: The engine's completions do not match the requests one to one.
        RewardError: `scorer` raised it.
    """
    requests = [request for group in groups for request in group.missing]
    num_missing = num_wanted - sum(group.is_whole for group in groups)
    if num_missing <= 0 or not requests:
        return list(groups)
    is_enough = _Enough(groups, num_missing) if num_wanted < len(groups) else None
    early = _EarlyScores(scorer, requests, params)
    completions = _checked(requests, _completions(engine, requests, params, early, is_enough), params)
    if is_enough is None:
        finished = {completion.request_id: completion for completion in completions}
        return _updated(groups, finished, {}, early.scores)
    finished, partials = dict[str, Completion](), dict[str, Completion]()
    for completion in completions:
        num_tokens = completion.tokens.numel()
        if completion.finish_reason != "abort" or completion.request_id in is_enough.told:
            finished[completion.request_id] = completion
        elif num_tokens >= params.max_response_tokens:  # aborted just after its last token
            finished[completion.request_id] = replace(completion, finish_reason="length")
        elif num_tokens:
            partials[completion.request_id] = completion
    return _updated(groups, finished, partials, early.scores)


def score_groups(scorer: Scorer, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """Score complete groups: all responses that were not scored when they ended, in one batch.

    Raises:
        RewardError: `scorer` raised it.
    """
    rest = [answer for group in groups for answer in group.answers if answer[0].id not in group.scores]
    found = scorer.score_all([_scorable(*answer) for answer in rest])
    late = {request.id: scored for (request, _), scored in zip(rest, found, strict=True)}
    return [
        replace(group, scored=tuple({**late, **group.scores}[request.id] for request, _ in group.answers))
        for group in groups
    ]


async def scored_response(scorer: Scorer, request: Request, completion: Completion) -> Sample | Fault:
    """Return a response's sample with its reward, or the fault that prevents training; see `Scorer.score`."""
    return await scorer.score(*_scorable(request, completion))


def _completions(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    ended: HasEnded,
    is_enough: IsEnough | None,
) -> list[Completion]:
    if isinstance(engine, TrajectoryEngine):
        return engine.generate_each(requests, params, ended, is_enough)
    assert is_enough is None, "checks.sampling_rules demands an engine that can abort responses"
    return engine.generate(requests, params)


class _EarlyScores:
    """Scores responses as they end; a part of `sample`."""

    def __init__(self, scorer: Scorer, requests: Sequence[Request], params: SamplingParams) -> None:
        self.scores: dict[str, Sample | Fault] = {}
        self._scorer, self._params = scorer, params
        self._requests = {request.id: request for request in requests}

    async def __call__(self, completion: Completion) -> None:
        if completion.finish_reason == "abort":
            return  # it may be resumed
        request = self._requests[completion.request_id]
        _checked([request], [completion], self._params)
        self.scores[request.id] = await scored_response(self._scorer, request, completion)


class _Enough:
    """Counts the groups that must still become whole; a part of `sample`."""

    def __init__(self, groups: Sequence[PromptGroup], num_missing: int) -> None:
        self.told: set[str] = set()  # requests that ended or were given up before enough groups were whole
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
    groups: Sequence[PromptGroup],
    finished: Mapping[str, Completion],
    partials: Mapping[str, Completion],
    scores: Mapping[str, Sample | Fault],
) -> list[PromptGroup]:
    """Return the groups with the finished completions, their scores, and the partial completions to resume."""

    def update(group: PromptGroup) -> PromptGroup:
        old = zip(group.requests, group.completions, strict=True)
        requests = [replace(r, partial=partials.get(r.id, r.partial)) for r in group.requests]
        completions = [completion or finished.get(request.id) for request, completion in old]
        own = {request.id: scores[request.id] for request in requests if request.id in scores}
        return replace(
            group,
            requests=tuple(requests),
            completions=tuple(completions),
            scores={**group.scores, **own},
        )

    return [update(group) for group in groups]


def _checked(
    requests: Sequence[Request], completions: Sequence[Completion], params: SamplingParams
) -> Sequence[Completion]:
    """Return the completions after checking that they match the requests, with one log-prob per token."""
    wanted, given = [r.id for r in requests], [c.request_id for c in completions]
    if wanted != given:
        first = next((pair for pair in zip(wanted, given, strict=False) if pair[0] != pair[1]), None)
        found = f"{first[1]!r} in place of {first[0]!r}" if first else f"{len(given)} completions"
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


def _scorable(request: Request, completion: Completion) -> tuple[Prompt, Sample, Episode | None]:
    """Return the prompt, the sample without a reward, and the episode of a response."""
    assert request.prompt is not None, "requests of groups name their prompts"
    return request.prompt, _sample(request, completion), completion.episode


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
