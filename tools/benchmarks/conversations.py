"""Conversations one by one against turns together, with responses, environments and rewards of mixed latency.

Nothing is computed: a session, an environment and a reward wait as long as a lognormal distribution says, the
same in both. Turns together wait for the slowest response and the slowest environment of each turn, and are
scored when all have ended.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import Completion, Request, SamplingParams, aborted, joined
from megatron_dppo.engines.counts import EngineCounts
from megatron_dppo.environments import InProcess, Observation, Trajectory, Turn
from megatron_dppo.rewards import RewardFault, RewardRequest, RewardResult
from megatron_dppo.rollout.conversations import TurnLimits
from megatron_dppo.rollout.group_sampling import sample, score_groups
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.multi_turn import MultiTurnEngine
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.runtime.concurrency import all_of, run_loop
from megatron_dppo.types import Prompt
from tools.benchmarks.benchmarking import cli

NUM_TURNS, SIGMA = 3, 1.0


def seconds(median_s: float, *what: object) -> float:
    """Return how long something takes: lognormal, and always the same."""
    return random.Random(str(what)).lognormvariate(0.0, SIGMA) * median_s


class Words:
    """One token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the characters' numbers."""
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """Return the characters."""
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: Any, **_: Any) -> Any:
        """No prompt is a chat."""
        raise NotImplementedError


class Asking(InProcess):
    """Answers each response after a while, and asks again."""

    def __init__(self, median_s: float) -> None:
        super().__init__(lambda: self)  # type: ignore[arg-type, return-value]
        self._median_s = median_s

    def reset(self, trajectories: Any) -> Any:
        """Open with the prompts."""
        return [Observation(each.prompt.text) for each in trajectories]

    async def answer(self, trajectory: Trajectory) -> Turn:
        """Ask until the last turn."""
        num_turns = len(trajectory.responses)
        await asyncio.sleep(seconds(self._median_s, trajectory.id, num_turns))
        return Turn("?", None, done=num_turns == NUM_TURNS)


class Together:
    """Samples batches: as long as the slowest of them takes."""

    weight_version, counts = 0, EngineCounts()

    def __init__(self, median_s: float) -> None:
        self._median_s = median_s

    def taken_s(self, request: Request) -> float:
        """Return how long the response to a request takes."""
        num_before = request.partial.tokens.numel() if request.partial else 0
        return seconds(self._median_s, request.id, num_before)

    def answered(self, request: Request) -> Completion:
        """Return one token behind what there is."""
        one = Completion(request.id, torch.tensor([65]), torch.zeros(1), "stop", None, None, ())
        return joined(aborted(request), one) if request.partial else one

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        time.sleep(max(map(self.taken_s, requests)))
        return [self.answered(request) for request in requests]


class OneByOne(Together):
    """Samples each response for itself."""

    is_held, errors = False, dict[str, Any]()

    @asynccontextmanager
    async def session(self, *, may_be_held: bool = True) -> AsyncIterator["OneByOne"]:
        """See `ConcurrentEngine.session`."""
        yield self

    async def ask(self, request: Request, params: SamplingParams) -> Completion:
        """See `Session.ask`."""
        await asyncio.sleep(self.taken_s(request))
        return self.answered(request)

    async def hold(self) -> None:
        """Nothing is held."""

    def load_weights(self, *_: Any) -> str:
        """There are no weights."""
        raise NotImplementedError


class Judge:
    """Scores a response after a while."""

    def __init__(self, median_s: float) -> None:
        self._median_s = median_s

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        """See `RewardScorer.score`."""
        return run_loop(all_of(map(self.score_one, requests)))

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        """See `RewardScorer.score_one`."""
        await asyncio.sleep(seconds(self._median_s, request.prompt.id))
        return RewardResult(1.0)


def main(
    num_prompts: int = 32, response_s: float = 0.1, environment_s: float = 0.1, reward_s: float = 0.1
) -> None:
    """Measure a rollout of 8 conversations of 3 turns for each prompt; the seconds are medians."""
    taken_s: dict[str, float] = {}
    for name, kind in (("turns together", Together), ("one by one", OneByOne)):
        environments = Asking(environment_s)
        engine = MultiTurnEngine(kind(response_s), environments, Words(), TurnLimits(NUM_TURNS))  # type: ignore[arg-type]
        maker = GroupMaker(Words(), 8, 99, seed=0, environments=environments)
        places = [(i, Drawn(i, Prompt(str(i), "", "test", text="?"))) for i in range(num_prompts)]
        groups, scorer = maker.begin(0, places), Scorer(Words(), Judge(reward_s), False, None)
        began = time.perf_counter()
        sampled = score_groups(scorer, sample(engine, groups, SamplingParams(99), num_prompts, scorer))
        taken_s[name] = time.perf_counter() - began
        assert sum(len(group.samples) for group in sampled) == 8 * num_prompts
        print(f"{name}: {taken_s[name]:.2f} s")
    print(f"{taken_s['turns together'] / taken_s['one by one']:.2f} times as fast")


if __name__ == "__main__":
    cli(main, __doc__)
