"""Samples one rank's open groups: begins them, keeps them until they are taken, and replaces some of them."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_dppo.data.prompts.prompts import Drawn, PromptStream
from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup
from megatron_dppo.rollout.sampler import GroupSampler, Produced
from megatron_dppo.rollout.staleness import OpenGroup, Places, ProducerState


@dataclass
class _Turn:
    """A group's turn in a rollout. Its group is replaced if its prompt is too long or its rewards are equal."""

    order: int  # place of its first group, by which turns are sorted
    index: int  # index of its group in the rollout that begins it, over all ranks
    num_replaced: int = 0  # groups with equal rewards that it had before
    group: PromptGroup | None = None  # None until its prompt is ready

    @property
    def is_whole(self) -> bool:
        """Whether all responses of its group have ended and are scored."""
        return self.group is not None and self.group.is_whole

    def is_to_be_replaced(self, limit: int) -> bool:
        """Whether all rewards of its group are equal, and fewer than `limit` groups were replaced before."""
        return self.num_replaced < limit and self.group is not None and self.group.has_zero_variance

    def next(self, index: int) -> "_Turn":
        """Return the turn for the group that replaces its group."""
        return _Turn(self.order, index, self.num_replaced + 1)


@dataclass(eq=False)
class Producer:
    """Keeps one rank's groups open, and samples them between `go_on` and `hold`.

    All methods run in one event loop. Every wait for a server, a reward or an environment has a limit:
    rollout.sglang.request_timeout_s, the time-outs of [data], and the session's limit for a hold.
    """

    maker: GroupMaker
    sampler: GroupSampler
    stream: PromptStream
    share: tuple[int, int]  # (rank, size) of the job
    num_threads: int = 1  # environments that may be reset at once
    max_replaced: int = 0  # times that a group with equal rewards is replaced
    in_rounds: bool = False  # all open groups begin together, and are replaced once all of them are whole

    def __post_init__(self) -> None:
        self._places = Places(*self.stream.upcoming, self.share).repeated(self.stream.period)
        self._rollout, self._num_begun = None, 0  # the rollout that groups begin in; None if it is not known
        self._too_long, self._num_too_long = set[int](), 0  # prompts in a row that were too long
        self._has_news = False
        self._open = dict[int, _Turn]()  # by the place of its group
        self._threads = ThreadPoolExecutor(max(self.num_threads, 1), thread_name_prefix="environment")

    async def begin_rollout(self, rollout: int, version: int, places: Places, limit: int) -> None:
        """Begin `limit` groups of one rollout with the engine's weights; no group is open before.

        Args:
            rollout: Index of the rollout; it names the requests and their noise.
            version: Version of these weights.
            places: Next prompts of this rank.
            limit: Number of groups.
        """
        self._places = places.repeated(self.stream.period)
        self._rollout, self._num_begun = rollout, 0
        await self.go_on(version, limit)

    async def go_on(self, version: int, limit: int) -> None:
        """Start or resume sampling with the engine's weights, with up to `limit` open groups.

        Args:
            version: Version of these weights.
            limit: Number of groups that may be open on this rank.
        """
        await self.sampler.go_on(version, may_be_held=not self.in_rounds)
        await self.begin_groups(limit)

    async def begin_groups(self, limit: int) -> None:
        """Begin groups until `limit` are open."""
        self._begin([None] * (limit - len(self._open)))

    async def progress(self, limit_s: float | None) -> ProducerState:
        """Wait until a group becomes whole, or all of them if they are sampled in rounds.

        Args:
            limit_s: Longest wait in seconds; None means no limit.

        Returns:
            The open groups, and the indices of the next prompts.
        """
        await self.sampler.wait(lambda: self._is_all_whole if self.in_rounds else self._has_news, limit_s)
        self._has_news = False
        if self._rollout is not None and self._is_all_whole:
            self.sampler.require_answers()
        return self.state

    @property
    def state(self) -> ProducerState:
        """The open groups, and the indices of the next prompts."""
        return self._places.state(
            [
                OpenGroup(self._places.rank, place, turn.group and turn.group.born, turn.is_whole, turn.order)
                for place, turn in self._open.items()
            ]
        )

    async def hold(self) -> Produced:
        """Stop sampling until `go_on`. Wait until no request is at a server; sampled tokens are kept.

        Returns:
            Counts and times between the last `take` and this call.
        """
        produced = self.sampler.counts(starts_again=False)
        await self.sampler.hold()
        for turn in self._open.values():
            if turn.group is not None and not turn.group.has_tokens and not turn.is_whole:
                turn.group.born = None
        return produced

    async def take(self, places: Iterable[int]) -> tuple[list[PromptGroup], Produced]:
        """Remove and return the whole groups of `places`, in order, with the counts since the last call."""
        groups = [group for place in places if (group := self._open.pop(place).group) is not None]
        return groups, self.sampler.counts(starts_again=True)

    async def finish_rollout(self) -> list[PromptGroup]:
        """End sampling, and drop the groups that are still open.

        Returns:
            The dropped groups.
        """
        await self.sampler.hold()
        await self.sampler.aclose()
        dropped = [turn.group for turn in self._open.values() if turn.group is not None]
        self._open.clear()
        return dropped

    async def end(self) -> None:
        """Abort requests at servers, and end all tasks; open groups are lost."""
        try:
            await self.hold()
        finally:
            await self.sampler.aclose()
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _is_all_whole(self) -> bool:
        return all(turn.is_whole for turn in self._open.values())

    def _begin(self, turns: Iterable[_Turn | None]) -> None:
        """Begin the next group in each of the turns; None is a new turn."""
        places, (rank, size) = list[int](), self.share
        for turn in turns:
            place, index = self._places.take(), rank + size * self._num_begun
            self._num_begun += 1
            self._open[place] = _Turn(place, index) if turn is None else turn.next(index)
            places.append(place)
        for together in [places] if self.in_rounds else [[place] for place in places]:
            self.sampler.start(self._make(together))

    async def _make(self, places: Sequence[int]) -> None:
        """Make groups, and start their responses together; the next prompts replace those that are too long."""
        groups = list[PromptGroup]()
        while places:
            drawn = [(self._name(place), self.stream.at(place)) for place in places]
            made = await asyncio.get_running_loop().run_in_executor(
                self._threads, self.maker.begin, self._rollout, drawn
            )
            for group in made:
                self._open[group.drawn.place].group = group
            groups += made
            too_long = [place for place in places if self._open[place].group is None]
            self._count_too_long([self.stream.at(place) for place in too_long], is_all=not made)
            places = [self._places.take() for _ in too_long]
            self._open |= {new: self._open.pop(old) for old, new in zip(too_long, places, strict=True)}
        for group in sorted(groups, key=lambda group: group.index):
            self.sampler.begin(group, self._keep)

    def _count_too_long(self, prompts: Sequence[Drawn], *, is_all: bool) -> None:
        """Count prompts that are too long, and raise once they were all that this rank found in all prompts."""
        self.sampler.count(num_too_long=len(prompts))
        found = {id(drawn.prompt) for drawn in prompts}
        self._too_long = self._too_long | found if is_all else set[int]()
        self._num_too_long = self._num_too_long + len(prompts) if is_all else 0
        most = 2 * self.share[1] * self.stream.num_prompts  # in which the rank has drawn from all epochs
        if len(self._too_long) >= self.stream.num_prompts or self._num_too_long >= most:
            raise RolloutError(
                f"rollout: found {len(self._too_long)} of {self.stream.num_prompts} prompts longer than "
                "data.max_prompt_tokens, and no other prompt for this rank; expected some to sample from. "
                "Raise the limit, or shorten the prompts or the text that environments add."
            )

    def _keep(self, group: PromptGroup) -> None:
        """Keep a group that is whole until it is taken, or replace it if all its rewards are equal."""
        group.born = self.sampler.version if group.born is None else group.born  # None only without a token
        if not self.in_rounds:
            self._replace_equal([group.drawn.place])
        elif self._is_all_whole:
            self._replace_equal(sorted(self._open, key=lambda place: self._open[place].order))
        self._has_news = True

    def _replace_equal(self, places: Iterable[int]) -> None:
        """Replace groups with equal rewards in one step, so that the number of open groups does not change."""
        equal = [place for place in places if self._open[place].is_to_be_replaced(self.max_replaced)]
        turns = [self._open.pop(place) for place in equal]
        if turns:
            self.sampler.count(replaced=tuple(turn.group for turn in turns if turn.group is not None))
            self._begin(turns)

    def _name(self, place: int) -> int:
        """Return the number in the names of a group's requests: its index in the rollout, if that is known."""
        return place if self._rollout is None else self._open[place].index
