"""Schedules the groups of a rollout: over-sampling, partial rollouts and dynamic sampling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dppo.config.schema import RolloutConfig
from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.rollout.collect import score_groups, usable_groups
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.engine import RolloutEngine, SamplingParams
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, sample
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.types import DataCursor, SampleGroup

_SMALLEST_GROUP = 2  # one sample has nothing to compare with


@dataclass(frozen=True)
class RankPlaces:
    """Places of the prompts that one rank took, for the other ranks."""

    out_of_turn: tuple[int, ...]  # for groups that replaced others
    open: tuple[int, ...]  # of groups that the next rollout goes on with


class RolloutScheduler:
    """Schedules one rank's groups from rollout to rollout.

    A rollout draws its prompts from the stream that all ranks hold, each rank its share. With over-sampling the
    first draws more than are wanted, and ends once the wanted number of groups is whole; the others are kept
    and come first in the next, which draws the wanted number of prompts, so that as many groups are open again.
    A group is replaced by one of a prompt that comes next in the stream, where every `size`-th is this rank's.
    """

    def __init__(
        self,
        options: RolloutConfig,
        share: tuple[int, int],
        engine: RolloutEngine,
        maker: GroupMaker,
        scorer: Scorer,
        params: SamplingParams,
    ) -> None:
        """Keep the options; draws no prompt.

        Args:
            options: [rollout] of the run.
            share: (rank, size) of the job.
            engine: Samples; interruptible where there is over-sampling.
            maker: Makes groups of prompts.
            scorer: Scores whole groups.
            params: How to sample.
        """
        self._options, self._share, self._engine = options, share, engine
        self._maker, self._scorer, self._params = maker, scorer, params
        self._kept: list[PromptGroup] | None = None  # none before the first rollout, and where nothing is kept
        self._out_of_turn: list[int] = []

    def run(self, rollout: int, stream: PromptStream) -> tuple[list[SampleGroup], RolloutCounts]:
        """Sample this rank's share of a rollout; draws from `stream`, which is the same on every rank."""
        options, (rank, size) = self._options, self._share
        groups, num_too_long = self._begin(rollout, stream)
        num_wanted = max(len(range(rank, options.prompts_per_rollout, size)) - num_too_long, 0)
        whole, rest = self._sample(groups, num_wanted)
        if options.over_sampling > 1:  # which groups are whole first is chance, and so is their place
            whole = [replace(group, index=rank + size * i) for i, group in enumerate(whole)]
        scored, replaced = score_groups(self._scorer, whole), list[PromptGroup]()
        for _ in range(options.max_refills if options.refill_zero_variance else 0):
            equal = [at for at, group in enumerate(scored) if group.has_zero_variance]
            if not equal:
                break
            fresh = self._ahead(rollout, stream, len(equal))
            num_too_long += len(equal) - len(fresh)
            whole, rest = self._sample([*rest, *fresh], min(len(equal), len(rest) + len(fresh)))
            for at, group in zip(equal, score_groups(self._scorer, whole), strict=False):
                replaced.append(scored[at])
                scored[at] = replace(group, index=scored[at].index)
        self._kept = rest if options.keep_partials else None
        return usable_groups(
            scored,
            replaced,
            min(_SMALLEST_GROUP, self._maker.samples_per_prompt),
            num_too_long=num_too_long,
            weight_version=self._engine.weight_version,
            rest=rest,
            keeps_rest=options.keep_partials,
        )

    def forget(self) -> None:
        """Drop the open groups of earlier rollouts; the stream gives their prompts again."""
        self._kept, self._out_of_turn = None, []

    @property
    def places(self) -> RankPlaces:
        """Places that this rank took since `settle`, and those of its open groups."""
        return RankPlaces(tuple(self._out_of_turn), tuple(group.drawn.place for group in self._kept or ()))

    def settle(self, stream: PromptStream, ranks: Sequence[RankPlaces]) -> DataCursor:
        """Mark the prompts that all ranks took in a rollout as used in this rank's stream.

        Returns:
            The cursor that a run goes on from which holds none of the open groups: it gives their prompts
            once more, before all others. What was sampled of them is not in it.
        """
        stream.pass_over(place for rank in ranks for place in rank.out_of_turn)
        self._out_of_turn = []
        return stream.cursor_with(place for rank in ranks for place in rank.open)

    def _begin(self, rollout: int, stream: PromptStream) -> tuple[list[PromptGroup], int]:
        """Return the groups to sample, kept ones first, and the number of new prompts that were too long."""
        options, (rank, size) = self._options, self._share
        self._num_ahead, num_drawn = 0, options.prompts_per_rollout
        if self._kept is None:
            num_drawn = math.ceil(options.over_sampling * num_drawn)
        drawn = stream.draw(num_drawn)
        own = [(index, drawn[index]) for index in range(rank, num_drawn, size)]
        fresh = self._maker.begin(rollout, own)
        return [*(self._kept or ()), *fresh], len(own) - len(fresh)

    def _ahead(self, rollout: int, stream: PromptStream, count: int) -> list[PromptGroup]:
        """Begin groups of this rank's next prompts, out of order; prompts too long are dropped."""
        rank, size = self._share
        distances = [rank + size * (self._num_ahead + i) for i in range(count)]
        drawn = [stream.ahead(distance) for distance in distances]
        self._num_ahead += count
        self._out_of_turn += [each.place for each in drawn]
        first = math.ceil(self._options.over_sampling * self._options.prompts_per_rollout)
        return self._maker.begin(rollout, [(first + d, each) for d, each in zip(distances, drawn, strict=True)])

    def _sample(
        self, groups: Sequence[PromptGroup], num_wanted: int
    ) -> tuple[list[PromptGroup], list[PromptGroup]]:
        """Sample until enough groups are whole; return the first wanted ones, and the others."""
        sampled = sample(self._engine, groups, self._params, num_wanted)
        whole = [at for at, group in enumerate(sampled) if group.is_whole][:num_wanted]
        rest = [group for at, group in enumerate(sampled) if at not in set(whole)]
        return [sampled[at] for at in whole], rest
