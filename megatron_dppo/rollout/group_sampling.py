"""Samples the responses of groups as conversations, and scores each response as soon as it ends."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import torch

from megatron_dppo.engines.base import Completion, Request, RolloutEngine, SamplingParams, Session, mask_of
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rollout.conversations import Ask
from megatron_dppo.rollout.groups import PromptGroup
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.runtime.concurrency import all_of, run_loop
from megatron_dppo.types import Sample

Converse = Callable[[Request, SamplingParams, Ask], Awaitable[Completion]]
"""Samples one trajectory with a function that samples its turns; see `Conversations.run`."""


class GroupSampler:
    """Samples the responses of groups with an engine's sessions. It keeps no state between calls."""

    def __init__(
        self, engine: RolloutEngine, converse: Converse, scorer: Scorer, params: SamplingParams
    ) -> None:
        """Store the parts.

        Args:
            engine: Engine that samples the turns.
            converse: Function that samples one response.
            scorer: Scorer of each response.
            params: Sampling parameters of every response.
        """
        self.engine, self.params = engine, params
        self._converse, self._scorer = converse, scorer

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
        return _checked(request, await self._converse(request, self.params, ask), self.params)

    async def keep(self, group: PromptGroup, index: int, completion: Completion) -> None:
        """Add a response that has ended to its group, and score it."""
        request = group.requests[index]
        group.completions[index] = completion
        assert request.prompt is not None, "requests of groups name their prompts"
        sample = sample_of(request, completion)
        group.scored[index] = await self._scorer.score(request.prompt, sample, completion.episode)

    async def _sample(self, groups: Sequence[PromptGroup], num_wanted: int) -> None:
        missing = [(group, index) for group in groups for index in group.missing]
        asked = [(group, index) for group, index in missing if group.completions[index] is None]
        for group, index in missing:
            if (given_up := group.completions[index]) is not None:  # its environment could not begin
                await self.keep(group, index, given_up)
        if not asked:
            return
        async with self.engine.session(may_be_held=num_wanted < len(groups)) as session:

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


def _checked(request: Request, completion: Completion, params: SamplingParams) -> Completion:
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
