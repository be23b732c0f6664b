"""Multi-turn rollouts: samples whole trajectories with an engine that samples single responses."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from megatron_dppo.engines.base import (
    Completion,
    ConcurrentEngine,
    EngineWrapper,
    HasEnded,
    IsEnough,
    Request,
    RolloutEngine,
    SamplingParams,
    Session,
)
from megatron_dppo.environments import Environments
from megatron_dppo.errors import RolloutError, ServerError
from megatron_dppo.rollout.batched_turns import BatchedTurns
from megatron_dppo.rollout.conversations import Ask, Conversations, TurnLimits
from megatron_dppo.rollout.scoring import Tokenizer
from megatron_dppo.runtime.concurrency import all_of, run_loop

_Turns = Callable[[Callable[[Ask], Awaitable[Completion]]], Awaitable[Completion]]
"""Runs a conversation with a function that samples its turns."""


class MultiTurnEngine(EngineWrapper):
    """Samples whole trajectories with an engine; implements `engines.base.TrajectoryEngine`.

    If the engine samples single responses, each trajectory continues as soon as it can. If the engine samples
    batches, one call samples a turn of all open trajectories.
    """

    def __init__(
        self, engine: RolloutEngine, environments: Environments, tokenizer: Tokenizer, limits: TurnLimits
    ) -> None:
        super().__init__(engine)
        self._limits = limits
        self._conversations = Conversations(environments, tokenizer, limits)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Sample one trajectory per request, with its `episode`; see `RolloutEngine.generate`.

        `params.max_response_tokens` bounds all tokens after the prompt, observations included.

        Raises:
            RolloutError: The engine raised it; no request has a completion.
        """
        return self.generate_each(requests, params, _ignored)

    def generate_each(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        ended: HasEnded,
        is_enough: IsEnough | None = None,
    ) -> list[Completion]:
        """Sample like `generate`, and call `ended` for each completion when it ends; see `TrajectoryEngine`.

        Raises:
            RolloutError: `generate` raised it, or `is_enough` is set and trajectories may have several turns.
        """
        if is_enough is not None and self._limits.max_turns > 1:
            raise RolloutError(
                f"found over-sampling of conversations of up to {self._limits.max_turns} turns; expected "
                "one turn. Set rollout.over_sampling = 1."
            )
        return run_loop(self._generate(requests, params, ended, is_enough)) if requests else []

    async def _generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        ended: HasEnded,
        is_enough: IsEnough | None,
    ) -> list[Completion]:
        async with self._turns(may_be_held=is_enough is not None) as (turns, session):

            async def trajectory(request: Request) -> Completion:
                completion = await turns(partial(self._conversations.run, request, params))
                if session is not None and is_enough is not None:
                    await _hold_if(is_enough, completion, session)
                if session is not None:  # without a session, all completions of a batch end together
                    await ended(completion)
                return completion

            completions = await all_of(map(trajectory, requests))
        lost = [error for error in session.errors.values() if isinstance(error, ServerError)] if session else []
        if len(lost) == len(requests):
            raise lost[0]
        return completions

    @asynccontextmanager
    async def _turns(self, *, may_be_held: bool) -> AsyncIterator[tuple[_Turns, Session | None]]:
        if isinstance(self._engine, ConcurrentEngine):
            async with self._engine.session(may_be_held=may_be_held) as session:
                yield lambda conversation: conversation(session.ask), session
        else:
            assert not may_be_held, "checks.sampling_rules demands an engine that can abort responses"
            yield BatchedTurns(self._engine).run, None


async def _hold_if(is_enough: IsEnough, completion: Completion, session: Session) -> None:
    if not session.is_held and is_enough(completion):
        await session.hold()


async def _ignored(completion: Completion) -> None:
    pass
