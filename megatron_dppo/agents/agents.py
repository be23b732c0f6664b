"""Runs episodes: a harness in a worker calls the policy over HTTP in place of an environment."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from megatron_dppo.agents.episode import Episode, EpisodeLimits
from megatron_dppo.agents.harness import AgentOutcome, EpisodeTask, HarnessPool
from megatron_dppo.agents.rendering import LibraryRendering, Rendering
from megatron_dppo.agents.server import AgentServer
from megatron_dppo.config.schema import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import Ask, Completion, Request, SamplingParams
from megatron_dppo.workers.service import WorkerFault

Converse = Callable[[Request, SamplingParams, Ask], Awaitable[Completion]]


def harness_pool(options: RolloutConfig, data: DataConfig) -> HarnessPool:
    """Return workers for the harness of [rollout.agent]; starts none."""
    return HarnessPool(
        options.agent.harness,
        options.agent.command,
        memory_mb=data.reward_memory_mb,
        environment=data.worker_environment,
    )


def rendering_of(tokenizer: Any, options: AgentConfig) -> Rendering:
    """Return what renders the chats of an agent.

    Raises:
        DataError: The tokenizer has no chat template, or the renderer cannot be made.
    """
    if options.renderer is None:
        return Rendering(tokenizer, options.thinking)
    return LibraryRendering(tokenizer, options.thinking, options.renderer)


class Agents:
    """The endpoint and the harnesses of a run, from `start` to `close`. Episodes may be in several loops."""

    def __init__(self, options: RolloutConfig, data: DataConfig) -> None:
        """Store the settings of [rollout] and [data]; starts nothing."""
        self._pool, self._server, self._agent = harness_pool(options, data), AgentServer(), options.agent
        self._limits = EpisodeLimits(
            options.agent.episode_timeout_s,
            options.agent.call_timeout_s,
            options.agent.max_calls,
            options.agent.train,
            data.max_prompt_tokens,
            options.max_turn_tokens,
        )

    def start(self) -> None:
        """Start the endpoint, and load the harness in one worker.

        Raises:
            AgentFailedError: The harness cannot be loaded.
        """
        self._server.start()
        self._pool.start()

    def close(self) -> None:
        """End the workers and the endpoint."""
        self._pool.close()
        self._server.close()

    def converse(self, tokenizer: Any) -> Converse:
        """Return a function that runs one episode; it needs its own tokenizer in each thread.

        Raises:
            DataError: The tokenizer has no chat template, or the renderer cannot be made.
        """
        return partial(self._run, rendering_of(tokenizer, self._agent))

    async def _run(
        self, rendering: Rendering, request: Request, params: SamplingParams, ask: Ask
    ) -> Completion:
        """Run one episode, and return the conversation to train on, with its `episode`.

        A harness that raises, dies or takes too long costs its own sample. An aborted response ends the episode
        without a result.

        Raises:
            RolloutError: `ask` raised it.
            AgentFailedError: The harness cannot be loaded.
        """
        self._server.start()
        episode = Episode(request, params, ask, rendering, self._limits)
        key = self._server.open(episode)
        try:
            with TemporaryDirectory(prefix="episode_", ignore_cleanup_errors=True) as workdir:
                assert request.prompt is not None, "requests of groups name their prompts"
                task = EpisodeTask(request.prompt, self._server.base_url, key, workdir)
                outcome = await self._wait(episode, task)
        finally:
            self._server.seal(key)
        return episode.result(outcome)

    async def _wait(self, episode: Episode, task: EpisodeTask) -> AgentOutcome | str:
        """Return what the harness returns, or why it failed; it is killed if it takes too long."""
        work = asyncio.ensure_future(self._pool.ask_one(task))
        try:
            while not work.done() and not episode.ended.done():
                left = episode.seconds_left()
                if left <= 0:
                    call_s, all_s = self._limits.call_timeout_s, self._limits.episode_timeout_s
                    found = f"the harness worked for {call_s:g} s without a call, or for {all_s:g} s in all"
                    action = "Correct it, or raise rollout.agent.call_timeout_s or episode_timeout_s."
                    return f"prompt {task.prompt.id}: {found}. {action}"
                await asyncio.wait({work, episode.ended}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if episode.ended.done():
                return "the engine ended the episode"
            found = work.result()
            return found.message if isinstance(found, WorkerFault) else found
        finally:
            work.cancel()
            await asyncio.wait({work})
