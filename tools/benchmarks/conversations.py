"""Compares independent conversations with lockstep turns, if engine, environment and reward vary in latency.

Nothing is computed. A session, an environment and a reward wait for lognormal times, the same in both modes.
Lockstep turns ("turns together") wait for the slowest response and the slowest environment of each turn, and
are scored after all have ended.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import torch

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import Completion, Request, SamplingParams, Session, give_up, join_parts
from megatron_dppo.engines.batch_session import batch_session
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.environments import InProcess, Observation, Trajectory, Turn
from megatron_dppo.rewards import RewardFault, RewardRequest, RewardResult
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.groups import GroupMaker, GroupSampler
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.types import Prompt
from tools.benchmarks.benchmarking import cli

NUM_TURNS, SIGMA = 3, 1.0


def seconds(median_s: float, *what: object) -> float:
    """Return a lognormal duration that depends only on `what`."""
    return random.Random(str(what)).lognormvariate(0.0, SIGMA) * median_s


class Words:
    """Tokenizer with one token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the code points of the characters."""
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Return the characters."""
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: Any, **_: Any) -> Any:
        """Raise: no prompt is a chat."""
        raise NotImplementedError


class Asking(InProcess):
    """Environment that waits after each response, and then asks another question."""

    def __init__(self, median_s: float) -> None:
        super().__init__(lambda: self)  # type: ignore[arg-type, return-value]
        self._median_s = median_s

    def reset(self, trajectories: Any) -> Any:
        """Return the prompts as first observations."""
        return [Observation(each.prompt.text) for each in trajectories]

    async def answer(self, trajectory: Trajectory) -> Turn:
        """Return another question, until the last turn."""
        num_turns = len(trajectory.responses)
        await asyncio.sleep(seconds(self._median_s, trajectory.id, num_turns))
        return Turn("?", None, done=num_turns == NUM_TURNS)


class Together:
    """Engine that samples batches, and takes as long as the slowest response."""

    weight_version, counts = 0, EngineCounts()

    def __init__(self, median_s: float) -> None:
        self._median_s = median_s

    def taken_s(self, request: Request) -> float:
        """Return the seconds that the response to a request takes."""
        num_before = request.partial.tokens.numel() if request.partial else 0
        return seconds(self._median_s, request.id, num_before)

    def answered(self, request: Request) -> Completion:
        """Return the request's partial response with one more token."""
        one = Completion(request.id, torch.tensor([65]), torch.zeros(1), "stop", None, None, ())
        return join_parts(give_up(request), one) if request.partial else one

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        time.sleep(max(map(self.taken_s, requests)))
        return [self.answered(request) for request in requests]

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[Session]:
        """See `RolloutEngine.session`."""
        return batch_session(self.generate)

    def load_weights(self, *_: Any) -> str:
        """Raise: there are no weights."""
        raise NotImplementedError


class OneByOne(Together, Session):
    """Engine that samples each response independently."""

    is_held, errors = False, dict[str, Any]()

    @asynccontextmanager
    async def session(self, *, may_be_held: bool = True) -> AsyncIterator["OneByOne"]:
        """See `RolloutEngine.session`."""
        yield self

    async def ask(self, request: Request, params: SamplingParams) -> Completion:
        """See `Session.ask`."""
        await asyncio.sleep(self.taken_s(request))
        return self.answered(request)

    async def hold(self) -> None:
        """Do nothing: no request is ever held."""


class Judge:
    """Reward that scores a response after a wait."""

    def __init__(self, median_s: float) -> None:
        self._median_s = median_s

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """See `RewardScorer.score_one`."""
        await asyncio.sleep(seconds(self._median_s, request.prompt.id))
        return RewardResult(1.0)


def main(
    num_prompts: int = 32, response_s: float = 0.1, environment_s: float = 0.1, reward_s: float = 0.1
) -> None:
    """Measure a rollout with 8 conversations of 3 turns per prompt. Durations are medians in seconds."""
    taken_s: dict[str, float] = {}
    for name, kind in (("turns together", Together), ("one by one", OneByOne)):
        environments = Asking(environment_s)
        converse = Conversations(environments, Words(), TurnLimits(NUM_TURNS)).run
        maker = GroupMaker(Words(), 8, 99, seed=0, environments=environments)
        places = [(i, Drawn(i, Prompt(str(i), "", "test", text="?"))) for i in range(num_prompts)]
        groups, scorer = maker.begin(0, places), Scorer(Words(), Judge(reward_s), False, None)
        sampler = GroupSampler(kind(response_s).session, converse, scorer, SamplingParams(99))
        began = time.perf_counter()
        sampler.sample(groups)
        taken_s[name] = time.perf_counter() - began
        assert sum(len(group.samples) for group in groups) == 8 * num_prompts
        print(f"{name}: {taken_s[name]:.2f} s")
    print(f"{taken_s['turns together'] / taken_s['one by one']:.2f} times as fast")


if __name__ == "__main__":
    cli(main, __doc__)
