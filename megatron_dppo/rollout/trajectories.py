"""Builds the trajectory sampler: an engine with environments, agents, or the user's `rollout.generate`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from megatron_dppo.agents.agents import Agents
from megatron_dppo.agents.harness import most_open_episodes
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.config.rollout import (
    CommandSource,
    EnvironmentSource,
    GenerateSource,
    HarnessSource,
    RolloutConfig,
    SingleTurnSource,
)
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import (
    Ask,
    Request,
    RolloutEngine,
    SamplingParams,
    Session,
)
from megatron_dppo.engines.batch_session import batch_session
from megatron_dppo.environments import (
    EnvironmentFault,
    EnvironmentPool,
    Environments,
    InProcess,
    Response,
    SingleTurn,
    Trajectory,
)
from megatron_dppo.errors import EnvironmentFailedError, RolloutError
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.runtime.user_code import describe_error, digest_of, import_named, module_files
from megatron_dppo.types import FinishReason, Prompt, Sample
from megatron_dppo.workers.service import FileDigests

Generate = Callable[[RolloutEngine, Sequence[Request], SamplingParams], Sequence[Sample]]
"""Returns a response for each request, in order; may call the engine any number of times.

Use `engines.base.with_observation` and `Request.partial` to continue a conversation. Tokens that the engine did
not sample have a `loss_mask` of False. Change responses with `dataclasses.replace`, which keeps their number
of retractions. One with an `episode` brings its reward; without one, `data.reward` scores the complete
response. The function runs in the trainer's process: an exception stops the run, and there is no time-out.
"""


class UserGenerate:
    """Samples responses with a user's function, which may call an engine."""

    def __init__(self, name: str, function: Generate, engine: RolloutEngine, vocab_size: int) -> None:
        """Store the function and its engine.

        Args:
            name: Name of the function, for messages.
            function: Function of the user.
            engine: Engine that is passed to the function.
            vocab_size: Vocabulary size of the model.
        """
        self._engine = engine
        self._name, self._function, self._vocab_size = name, function, vocab_size

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """Return a completion of the function for each request, after checking them."""
        try:
            found: Any = self._function(self._engine, requests, params)
            completions: list[Any] = list(found)
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(f"rollout.generate: {self._name!r} raised {describe_error(error)}") from error
        if len(completions) != len(requests):
            raise self._wrong(
                "", f"{len(completions)} completions", f"one for each of {len(requests)} requests"
            )
        return [self._check(*pair, params) for pair in zip(requests, completions, strict=True)]

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[Session]:
        """See `RolloutEngine.session`; one call of the function gets all requests."""
        return batch_session(self.generate)

    def _check(self, request: Request, completion: Any, params: SamplingParams) -> Sample:
        if not isinstance(completion, Sample) or completion.id != request.id:
            found = f"{getattr(completion, 'id', type(completion).__name__)!r} in place of {request.id!r}"
            raise self._wrong("", found, "a Sample for each request, in order")
        if completion.finish_reason == "abort":
            return completion
        tokens, count = completion.tokens, completion.tokens.numel()
        mask, rows = completion.loss_mask, completion.wrong_rows(has_topk=params.num_topk_log_probs > 0)
        is_in_range = count == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < self._vocab_size)
        most, reasons = params.max_response_tokens, get_args(FinishReason)
        faults = [
            (tokens.dtype != torch.int64, f"tokens of {tokens.dtype}", "int64"),
            (count > most, f"{count} tokens", f"at most {most}"),
            (not is_in_range, "token ids beyond the vocabulary", f"0 to {self._vocab_size - 1}"),
            (bool(rows), f"rows {rows}", f"{count}, one per token"),
            (mask.dtype != torch.bool, f"loss_mask of {mask.dtype}", "bool"),
            (
                completion.finish_reason not in reasons,
                f"finish_reason {completion.finish_reason!r}",
                f"one of {reasons}",
            ),
        ]
        for is_there, found, expected in faults:
            if is_there:
                raise self._wrong(request.id, found, expected)
        return replace(completion, rollout_log_probs=completion.rollout_log_probs.detach().float())

    def _wrong(self, request_id: str, found: str, expected: str) -> RolloutError:
        where = f"rollout.generate: {self._name!r}" + (f", request {request_id}" if request_id else "")
        return RolloutError(f"{where}: found {found}; expected {expected}. Correct the function.")


class TrajectorySampler:
    """Samples trajectories with an environment, an agent or `rollout.generate`; owns their workers.

    Attributes:
        environments: Environments that give the first observation of each trajectory.
    """

    def __init__(
        self, options: RolloutConfig, data: DataConfig, engine: RolloutEngine, hf_folder: Path
    ) -> None:
        """Build the sampler, and start no worker.

        Args:
            options: Section [rollout].
            data: Section [data]; environments use the number and limits of the reward workers.
            engine: Engine that samples single turns; not owned.
            hf_folder: Folder with the model's config.json.
        """
        self._pool: EnvironmentPool | None = None
        self._agents: Agents | None = None
        self._open_session, self._is_users = engine.session, False
        self._limits = TurnLimits(options.max_turns, options.max_turn_tokens, options.thinking)
        match options.source:
            case SingleTurnSource():
                pass
            case EnvironmentSource(name):
                self._pool = environment_pool(name, data)
            case GenerateSource(name):
                vocab_size = int(read_model_config(hf_folder)[1]["vocab_size"])
                function = import_named("rollout.generate", name)
                self._open_session = UserGenerate(name, function, engine, vocab_size).session
                self._is_users = True
            case HarnessSource() | CommandSource():
                self._agents = Agents(options, data)
        self.environments: Environments = self._pool or InProcess(SingleTurn)

    def sampler(self, tokenizer: Any, scorer: Scorer, params: SamplingParams) -> GroupSampler:
        """Return a sampler of groups; each thread needs its own, with its own tokenizer."""
        if self._agents is not None:
            converse, most_open = self._agents.converse(tokenizer), most_open_episodes()
            return GroupSampler(self._open_session, converse, scorer, params, most_open)
        if self._is_users:
            converse = _ask_once
        elif self._pool is None:
            converse, params = _ask_once, replace(params, max_turn_tokens=self._limits.max_turn_tokens)
        else:
            converse = Conversations(self._pool, tokenizer, self._limits).run
        return GroupSampler(self._open_session, converse, scorer, params)

    @property
    def files(self) -> FileDigests:
        """Path and digest of each file of the user's code: what workers have read, commands, and modules."""
        pools = [each.files for each in (self._pool, self._agents) if each is not None]
        modules = module_files() if self._is_users else []
        return {(path, digest_of(path)) for path in modules}.union(*pools)

    def start(self, first: Prompt) -> None:
        """Step the environment once, or load the agent, so that a faulty one stops the run early."""
        if self._agents is not None:
            self._agents.start()
        if self._pool is not None:
            try_environment(self._pool, first)

    def close(self) -> None:
        """End the workers, and the endpoint of agents."""
        if self._agents is not None:
            self._agents.close()
        if self._pool is not None:
            self._pool.close()


async def _ask_once(request: Request, params: SamplingParams, ask: Ask) -> Sample:
    """Sample a trajectory of one response: without an environment, or with the user's function."""
    return await ask(request, params)


def environment_pool(name: str, data: DataConfig) -> EnvironmentPool:
    """Return workers for the environments; starts none."""
    return EnvironmentPool(
        name,
        num_workers=data.reward_workers,
        timeout_s=data.reward_timeout_s,
        memory_mb=data.reward_memory_mb,
        environment=data.worker_environment,
    )


def try_environment(environments: Environments, prompt: Prompt) -> None:
    """Begin a trajectory of a prompt, and respond with the reference answer."""
    trajectory = Trajectory("trial", prompt)
    (opening,) = environments.reset([trajectory])
    if isinstance(opening, EnvironmentFault):
        raise EnvironmentFailedError(f"rollout.environment: reset failed: {opening.message}")
    answered = replace(trajectory, responses=(Response(prompt.answer, "stop"),))
    (turn,) = environments.step([answered])
    if isinstance(turn, EnvironmentFault):
        raise EnvironmentFailedError(f"rollout.environment: step failed: {turn.message}")
