"""Samples one rank's open groups in a separate thread, while the trainer trains and pushes weights.

A push interrupts responses, and drops none (`sampler.GroupSampler`). The trainer's thread limits the number of
open groups. The producers of different ranks never communicate.
"""

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup
from megatron_dppo.rollout.sampler import GroupSampler, Produced
from megatron_dppo.rollout.staleness import OpenGroup, Places, ProducerState


@dataclass(eq=False)
class Producer:
    """Keeps one rank's groups open, and samples them between `go_on` and `hold`.

    All methods run in the producer's thread. An error there is kept as `fault`, and the trainer's thread raises
    it. Every wait has a limit: rollout.sglang.request_timeout_s for a request at each server, the time-outs of
    [data] for a reward or an environment, and the session's limit for a hold. The wait for a rollout also ends,
    with a fault, if all prompts are too long, or if a task was cancelled.

    Attributes:
        news: Set when a group becomes whole.
    """

    maker: GroupMaker
    sampler: GroupSampler  # its engine can abort responses
    stream: PromptStream
    share: tuple[int, int]  # (rank, size) of the job
    num_threads: int = 1  # environments that may be reset at once
    max_replaced: int = 0  # groups with equal rewards that may be replaced per rollout

    def __post_init__(self) -> None:
        self._places = Places(*self.stream.upcoming, self.share)
        self._num_too_long_in_a_row = 0
        self._open: dict[int, PromptGroup | None] = {}  # by place; None until its prompt is ready
        self._threads = ThreadPoolExecutor(max(self.num_threads, 1), thread_name_prefix="environment")
        self.news = threading.Event()

    @property
    def fault(self) -> BaseException | None:
        """Error that ended the producer's work, or None."""
        return self.sampler.fault

    async def go_on(self, version: int, limit: int) -> None:
        """Start or resume sampling with the servers' weights, with up to `limit` open groups.

        Args:
            version: Version of these weights.
            limit: Number of groups that may be open on this rank.

        Raises:
            ServerError: No server responds and has the weights.
        """
        await self.sampler.go_on(version)
        await self.begin_groups(limit)

    async def begin_groups(self, limit: int) -> None:
        """Begin groups until `limit` are open."""
        while len(self._open) < limit:
            self._begin_next()

    def _begin_next(self) -> None:
        place = self._places.take()
        self._open[place] = None
        self.sampler.start(self._begin(place))

    def _replace(self, place: int) -> None:
        """Replace a group by the next one in one step, so that the number of open groups does not change."""
        del self._open[place]
        self._begin_next()

    async def _begin(self, place: int) -> None:
        """Make a group and start its responses; if its prompt is too long, replace it by the next group."""
        groups = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self.maker.begin(None, [(place, self.stream.at(place))])
        )
        if not groups:
            self.sampler.count(num_too_long=1)
            self._num_too_long_in_a_row += 1
            self._refuse_if_all_too_long()
            self._replace(place)
            return
        (group,) = groups
        self._num_too_long_in_a_row, self._open[place] = 0, group
        self.sampler.begin(group, self._keep)

    def _refuse_if_all_too_long(self) -> None:
        if self._num_too_long_in_a_row >= self.stream.num_prompts:
            raise RolloutError(
                f"rollout: found {self._num_too_long_in_a_row} prompts in a row longer than "
                f"data.max_prompt_tokens, out of {self.stream.num_prompts} prompts; expected some to sample "
                "from. Raise the limit, or shorten the prompts or the text that environments add."
            )

    def _keep(self, group: PromptGroup) -> None:
        """Keep a group that is whole until it is taken; replace it if all rewards are equal."""
        group.born = self.sampler.version if group.born is None else group.born  # None only without a token
        num_replaced = len(self.sampler.counts(starts_again=False).replaced)
        if group.has_zero_variance and num_replaced < self.max_replaced:
            self.sampler.count(replaced=(group,))
            self._replace(group.drawn.place)
        self.news.set()

    async def hold(self) -> Produced:
        """Stop sampling until `go_on`. Wait until no request is at a server; sampled tokens are kept.

        Returns:
            Counts and times between the last `take` and this call.
        """
        produced = self.sampler.counts(starts_again=False)
        await self.sampler.hold()
        for group in self._open.values():
            if group is not None and not group.has_tokens and not group.is_whole:
                group.born = None
        return produced

    async def state(self) -> ProducerState:
        """Return the open groups, and the indices of the next prompts."""
        groups = [
            OpenGroup(self._places.rank, place, group and group.born, group is not None and group.is_whole)
            for place, group in self._open.items()
        ]
        return self._places.state(groups)

    async def take(self, places: Iterable[int]) -> tuple[list[PromptGroup], Produced]:
        """Remove and return the whole groups of `places`, in order, with the counts since the last call."""
        groups = [group for place in places if (group := self._open.pop(place)) is not None]
        return groups, self.sampler.counts(starts_again=True)

    async def end(self) -> None:
        """Abort requests at servers, and end all tasks; open groups are lost."""
        try:
            await self.hold()
        finally:
            await self.sampler.aclose()
            self._threads.shutdown(wait=False, cancel_futures=True)
