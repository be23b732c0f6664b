"""The rollout side of a run: engine, prompts and reward, and the schedule of this rank's groups."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.config.schema import Config, RolloutConfig
from megatron_dppo.data.prompts.prompts import PromptsDigest, PromptStream, load_prompts
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.embedded.engine import TransformersEngine
from megatron_dppo.rollout.engine import RolloutEngine, SamplingParams
from megatron_dppo.rollout.evaluation import Evaluation, evaluation_sets, responses_file
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, sample, score_groups, usable_groups
from megatron_dppo.rollout.scores import PromptScore
from megatron_dppo.rollout.scoring import OverlongShaping, RewardPools, Scorer, training_reward
from megatron_dppo.rollout.sglang.client import Patience
from megatron_dppo.rollout.sglang.engine import SglangEngine
from megatron_dppo.rollout.sglang.model import served_model
from megatron_dppo.rollout.sglang.server import API_KEY, require_registered
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.routing_replay.capture import validate_routes
from megatron_dppo.types import DataCursor, ModelRouting, SampleGroup

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


def build_engine(config: Config, hf_folder: Path, device: torch.device) -> RolloutEngine:
    """Build the engine of rollout.engine for the model in `hf_folder` (its config, not its weights).

    Raises:
        ServerError: rollout.engine is "sglang", and the run's servers/ names no server that can be used.
    """
    if config.rollout.engine == "sglang":
        return _sglang_engine(config, hf_folder)
    model_config = AutoConfig.from_pretrained(hf_folder, trust_remote_code=False)
    return TransformersEngine(
        model_config,
        eos_token_ids=end_tokens(hf_folder, model_config.eos_token_id),
        weights=config.rollout.transformers.weights,
        batch_size=config.rollout.transformers.batch_size,
        device=device,
    )


def _sglang_engine(config: Config, hf_folder: Path) -> SglangEngine:
    folder, options = config.run.folder / "servers", config.rollout.sglang
    records = require_registered(folder)
    ids = json.loads((hf_folder / "config.json").read_text()).get("eos_token_id")
    patience = Patience(generate_timeout_s=options.request_timeout_s, max_attempts=options.max_attempts)
    return SglangEngine(
        [record.url for record in records],
        served_model(hf_folder, end_tokens(hf_folder, ids)),
        patience,
        max_concurrent_requests=options.max_concurrent_requests,
        api_key=os.environ.get(API_KEY),
    )


def end_tokens(hf_folder: Path, default: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens: generation_config.json's where it names any, else config.json's.

    Nothing else is read from generation_config.json: sampling is ours to say.
    """
    file = hf_folder / "generation_config.json"
    ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = default if ids is None else ids
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),)


class Rollouts:
    """Draws prompts, samples and scores; every rank holds the same prompt stream and takes its share."""

    def __init__(
        self,
        config: Config,
        hf_folder: Path,
        engine: RolloutEngine,
        *,
        share: tuple[int, int],
    ) -> None:
        """Read prompts and tokenizer, and try the rewards and the environment in workers.

        Args:
            config: The run's.
            hf_folder: Holds the model's config.json and its tokenizer.
            engine: Samples; its weights must be pushed before `next`.
            share: (rank, size) of the job: no two ranks sample the same prompt, whatever they train together.
        """
        self._config, self._engine, self._share = config, engine, share
        self.tokenizer: Any = AutoTokenizer.from_pretrained(hf_folder, trust_remote_code=False)
        rewards = [training_reward(config), *(each.reward for each in evaluation_sets(config))]
        self._rewards = RewardPools(config.data, rewards)
        self._sampler = TrajectorySampler(config.rollout, config.data, engine, self.tokenizer, hf_folder)
        self._prompts = load_prompts(config.data.prompts, config.data.prompt_column, config.data.answer_column)
        self._evaluation = Evaluation(config, self._sampler, self.tokenizer, self._rewards, share=share)
        self._stream = PromptStream(self._prompts, config.run.seed, config.data.shuffle)
        self._scheduler = self._make_scheduler(read_model_sizes(hf_folder).routing)
        self._rewards.start(self._evaluation.first_prompts | {training_reward(config): self._prompts[0]})
        self._sampler.start(self._prompts[0])

    def _make_scheduler(self, routing: ModelRouting | None) -> RolloutScheduler:
        options, config = self._config.rollout, self._config
        params = SamplingParams(
            max_response_tokens=options.max_response_tokens,
            temperature=options.temperature,
            num_topk_log_probs=options.num_topk_log_probs,
            capture_routes=options.routing_replay != "off",
        )
        validate = None
        if routing is not None and params.capture_routes:
            validate = partial(validate_routes, routing=routing)
        limits = options.samples_per_prompt, config.data.max_prompt_tokens, config.run.seed
        maker = GroupMaker(self.tokenizer, *limits, self._sampler.environments)
        rewards = self._rewards.of(training_reward(config))
        scorer = Scorer(self.tokenizer, rewards, params.capture_routes, validate, self._overlong())
        return RolloutScheduler(options, self._share, self._sampler.engine, maker, scorer, params)

    def _overlong(self) -> OverlongShaping | None:
        data, longest = self._config.data, self._config.rollout.max_response_tokens
        if data.overlong_buffer_tokens == 0:
            return None
        return OverlongShaping(longest, data.overlong_buffer_tokens, data.overlong_penalty)

    @property
    def prompts_digest(self) -> str:
        """Digest of all prompts, answers and ids in order: a cursor is valid only with the same digest."""
        digest = PromptsDigest()
        for prompt in self._prompts:
            digest.add(prompt)
        return digest.hexdigest()

    @property
    def cursor(self) -> DataCursor:
        """Cursor of the next prompt, while no group is open."""
        return self._stream.cursor

    def seek(self, cursor: DataCursor) -> None:
        """Continue from a checkpoint's cursor, and drop all open groups."""
        self._scheduler.forget()
        self._stream = PromptStream(self._prompts, self._config.run.seed, self._config.data.shuffle, cursor)

    def next(self, rollout: int) -> tuple[list[SampleGroup], RolloutCounts]:
        """Sample and score this rank's share of the next rollout; call `settle` after it.

        Returns:
            Groups whose samples have rewards, and no advantages yet; and counts of all that was sampled.
        """
        before = self._engine.counts
        groups, counts = self._scheduler.run(rollout, self._stream)
        return groups, replace(counts, engine=self._engine.counts - before)

    def settle(self, all_gather: Callable[[RankPlaces], Sequence[RankPlaces]]) -> DataCursor:
        """Return the cursor after a rollout, the same on every rank; all call it together, after `next`."""
        return self._scheduler.settle(self._stream, all_gather(self._scheduler.places))

    def evaluate(self, rollout: int, folder: Path) -> dict[str, list[PromptScore]]:
        """Score this rank's share of each evaluation set, and write the responses to files in `folder`.

        A response that was dropped, because its reward failed or for another reason, earns nothing and is not
        left out: a reward that fails on hard answers must not raise the score.
        """
        return {
            each.name: self._evaluation.run(each, rollout, responses_file(folder, each.name, rollout))
            for each in self._evaluation.sets
        }

    def close(self) -> None:
        """End the processes of the reward and of environments."""
        self._rewards.close()
        self._sampler.close()
