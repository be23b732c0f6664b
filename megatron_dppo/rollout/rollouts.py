"""Runs the rollout half of a run: engine, prompts, rewards, and the schedule of this rank's groups."""

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import end_tokens
from megatron_dppo.config.schema import Config, RolloutConfig
from megatron_dppo.data.prompts.prompts import PromptsDigest, PromptStream, load_prompts
from megatron_dppo.engines.base import RolloutEngine, SamplingParams
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.model import served_model
from megatron_dppo.engines.sglang.server import API_KEY, require_registered
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.rollout.ahead import Ahead, AllGather
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.evaluation import Evaluation, evaluation_sets, responses_file
from megatron_dppo.rollout.groups import GroupMaker, GroupSampler, PromptGroup, usable_groups
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.scores import PromptScore
from megatron_dppo.rollout.scoring import OverlongShaping, RewardPools, Scorer, training_reward
from megatron_dppo.rollout.staleness import Places, StalenessBound
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.routing_replay.routes import validate_routes
from megatron_dppo.types import DataCursor, ModelRouting, SampleGroup

_SMALLEST_GROUP = 2  # one sample has nothing to compare with


class RolloutScheduler:
    """Schedules one rank's groups, rollout by rollout; no group is open between two rollouts.

    All ranks have the same stream of prompts, and each takes its share of a rollout's prompts. With
    over-sampling a rollout begins more groups than it needs, and ends once enough groups are whole. The others
    are dropped, and their prompts do not return in this epoch. A group with equal rewards is replaced by a
    group that over-sampling left, or by the group of a later prompt of this rank (every `size`-th).
    """

    def __init__(
        self, options: RolloutConfig, share: tuple[int, int], maker: GroupMaker, sampler: GroupSampler
    ) -> None:
        """Keep the options; draws no prompt.

        Args:
            options: [rollout] of the run.
            share: (rank, size) of the job.
            maker: Group maker.
            sampler: Sampler; over-sampling requires an engine that can abort responses.
        """
        self._options, self._share, self._maker, self._sampler = options, share, maker, sampler
        self._num_drawn = math.ceil(options.over_sampling * options.prompts_per_rollout)  # over all ranks
        self._out_of_order: list[int] = []

    def run(
        self, rollout: int, stream: PromptStream, weight_version: int
    ) -> tuple[list[SampleGroup], RolloutCounts]:
        """Sample this rank's share of a rollout by the engine's weights of this version.

        It draws from `stream`, which is the same on every rank.
        """
        options, (rank, size) = self._options, self._share
        groups, num_too_long = self._begin(rollout, stream)
        num_wanted = max(len(range(rank, options.prompts_per_rollout, size)) - num_too_long, 0)
        scored, rest = self._sample(groups, num_wanted)
        if options.over_sampling > 1:  # chance decides which groups are whole first, so they get new indices
            for number, group in enumerate(scored):
                group.index = rank + size * number
        replaced = list[PromptGroup]()
        for _ in range(options.max_refills if options.refill_zero_variance else 0):
            equal = [at for at, group in enumerate(scored) if group.has_zero_variance]
            if not equal:
                break
            fresh = self._ahead(rollout, stream, len(equal))
            num_too_long += len(equal) - len(fresh)
            whole, rest = self._sample([*rest, *fresh], min(len(equal), len(rest) + len(fresh)))
            for at, group in zip(equal, whole, strict=False):
                replaced.append(scored[at])
                group.index, scored[at] = scored[at].index, group
        return usable_groups(
            scored,
            replaced,
            min(_SMALLEST_GROUP, self._maker.samples_per_prompt),
            num_too_long=num_too_long,
            weight_version=weight_version,
            rest=rest,
        )

    @property
    def out_of_order(self) -> Sequence[int]:
        """Indices of the prompts that this rank took out of order since `settle`, to replace groups."""
        return tuple(self._out_of_order)

    def settle(self, stream: PromptStream, ranks: Sequence[Sequence[int]]) -> DataCursor:
        """Mark all ranks' out-of-order prompts as used in this rank's stream, and return its cursor."""
        stream.pass_over(place for rank in ranks for place in rank)
        self._out_of_order = []
        return stream.cursor

    def _begin(self, rollout: int, stream: PromptStream) -> tuple[list[PromptGroup], int]:
        """Return the groups to sample, and the number of prompts that were too long."""
        rank, size = self._share
        self._num_ahead, drawn = 0, stream.draw(self._num_drawn)
        own = [(index, drawn[index]) for index in range(rank, len(drawn), size)]
        groups = self._maker.begin(rollout, own)
        return groups, len(own) - len(groups)

    def _ahead(self, rollout: int, stream: PromptStream, count: int) -> list[PromptGroup]:
        """Begin groups of this rank's next prompts, out of order; drop prompts that are too long."""
        rank, size = self._share
        distances = [rank + size * (self._num_ahead + i) for i in range(count)]
        drawn = [stream.ahead(distance) for distance in distances]
        self._num_ahead += count
        self._out_of_order += [each.place for each in drawn]
        places = [(self._num_drawn + d, each) for d, each in zip(distances, drawn, strict=True)]
        return self._maker.begin(rollout, places)

    def _sample(
        self, groups: Sequence[PromptGroup], num_wanted: int
    ) -> tuple[list[PromptGroup], list[PromptGroup]]:
        """Sample until `num_wanted` groups are whole; return these groups, and the others."""
        self._sampler.sample(groups, num_wanted)
        whole = [group for group in groups if group.is_whole][:num_wanted]
        return whole, [group for group in groups if group not in whole]


def build_engine(config: Config, hf_folder: Path, device: torch.device) -> RolloutEngine:
    """Build the engine of rollout.engine without weights, for the model config in `hf_folder`.

    Raises:
        ServerError: rollout.engine is "sglang", and the run's servers/ lists no usable server.
    """
    if config.rollout.engine == "sglang":
        return _sglang_engine(config, hf_folder)
    model_config = AutoConfig.from_pretrained(hf_folder, trust_remote_code=False)
    return TransformersEngine(
        model_config,
        eos_token_ids=end_tokens(hf_folder, model_config.eos_token_id),
        weights=config.embedded_weights,
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


class Rollouts:
    """Draws prompts, samples and scores responses. All ranks read the same prompts and take their shares."""

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
            config: Config of the run.
            hf_folder: Folder with the model's config.json and its tokenizer.
            engine: Engine; its weights must be pushed before `next`.
            share: (rank, size) of the job. No two ranks sample the same prompt, in any parallel layout.
        """
        self._config, self._engine, self._share = config, engine, share
        self.tokenizer: Any = AutoTokenizer.from_pretrained(hf_folder, trust_remote_code=False)
        rewards = [training_reward(config), *(each.reward for each in evaluation_sets(config))]
        self._rewards = RewardPools(config.data, rewards)
        self._sampler = TrajectorySampler(config.rollout, config.data, engine, hf_folder)
        self._prompts = load_prompts(config.data.prompts, config.data.prompt_column, config.data.answer_column)
        self._evaluation = Evaluation(config, self._sampler, self.tokenizer, self._rewards, share=share)
        self._stream = PromptStream(self._prompts, config.run.seed, config.data.shuffle)
        self._ahead: Ahead | None = None
        self._counted = engine.counts
        self._routing = read_model_sizes(hf_folder).routing
        self._scheduler = self._make_scheduler(self._routing)
        self._rewards.start(self._evaluation.first_prompts | {training_reward(config): self._prompts[0]})
        self._sampler.start(self._prompts[0])

    def _make_scheduler(self, routing: ModelRouting | None) -> RolloutScheduler:
        return RolloutScheduler(self._config.rollout, self._share, *self._parts(routing, self.tokenizer))

    def _make_ahead(self) -> Ahead:
        """Make the supplier of rollouts for sampling during training; its thread has its own tokenizer."""
        options, data, (_, size) = self._config.rollout, self._config.data, self._share
        tokenizer = copy.deepcopy(self.tokenizer)
        parts = self._parts(self._routing, tokenizer)
        stream, share = self._stream, -(-options.prompts_per_rollout // size)

        def producer(places: Places) -> Producer:
            return Producer(
                *parts,
                places,
                stream.at,
                num_prompts=stream.num_prompts,
                num_threads=data.reward_workers,
                max_replaced=options.max_refills * share if options.refill_zero_variance else 0,
            )

        bound = StalenessBound(options.prompts_per_rollout, options.max_staleness, options.over_sampling)
        smallest = min(_SMALLEST_GROUP, options.samples_per_prompt)
        return Ahead(bound, producer, stream, self._share, smallest)

    def _parts(self, routing: ModelRouting | None, tokenizer: Any) -> tuple[GroupMaker, GroupSampler]:
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
        maker = GroupMaker(tokenizer, *limits, self._sampler.environments)
        rewards = self._rewards.of(training_reward(config))
        scorer = Scorer(tokenizer, rewards, params.capture_routes, validate, self._overlong())
        return maker, self._sampler.sampler(tokenizer, scorer, params)

    def _overlong(self) -> OverlongShaping | None:
        data, longest = self._config.data, self._config.rollout.max_response_tokens
        if data.overlong_buffer_tokens == 0:
            return None
        return OverlongShaping(longest, data.overlong_buffer_tokens, data.overlong_penalty)

    @property
    def prompts_digest(self) -> str:
        """Digest of all prompts in order, with answers and ids; a cursor is valid only with the same digest."""
        digest = PromptsDigest()
        for prompt in self._prompts:
            digest.add(prompt)
        return digest.hexdigest()

    @property
    def cursor(self) -> DataCursor:
        """Cursor of the next prompt, while no group is open."""
        return self._stream.cursor

    def seek(self, cursor: DataCursor) -> None:
        """Continue from a checkpoint's cursor, and drop all open groups; call it between two rollouts."""
        self._stream = PromptStream(self._prompts, self._config.run.seed, self._config.data.shuffle, cursor)
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._make_ahead() if self.is_ahead else None

    @property
    def is_ahead(self) -> bool:
        """Whether sampling continues while the trainer trains; then `next_ahead` replaces `next`."""
        return self._config.rollout.max_staleness > 0

    def next(self, rollout: int) -> tuple[list[SampleGroup], RolloutCounts]:
        """Sample and score this rank's share of the next rollout; call `settle` after it.

        Returns:
            Groups with rewards but without advantages, and counts of everything that was sampled.
        """
        before = self._engine.counts
        groups, counts = self._scheduler.run(rollout, self._stream, self._engine.weight_version)
        return groups, replace(counts, engine=self._engine.counts - before)

    def next_ahead(
        self, version: int, all_gather: AllGather, is_asked_to_stop: Callable[[], bool]
    ) -> tuple[list[SampleGroup], RolloutCounts, Metrics] | None:
        """Wait for the next rollout, and take this rank's share; every rank calls it together.

        Args:
            version: Version of the weights that train next.
            all_gather: Gathers a value from all ranks.
            is_asked_to_stop: Returns whether this rank should stop.

        Returns:
            Groups and counts, as from `next`, and metrics of staleness. None on all ranks if any should stop.

        Raises:
            RolloutError: Sampling failed on some rank.
        """
        assert self._ahead is not None, "call it after `seek`, in a run that samples ahead"
        taken = self._ahead.next(version, all_gather, is_asked_to_stop)
        if taken is None:
            return None
        groups, counts = taken
        before, self._counted = self._counted, self._engine.counts
        return groups, replace(counts, engine=self._counted - before), self._ahead.metrics

    @contextmanager
    def pause(self, version: int, num_left: int) -> Iterator[Metrics]:
        """Pause sampling while the body pushes weights; then resume with the new weights.

        Args:
            version: Version of the pushed weights.
            num_left: Number of rollouts that the run still needs.

        Returns:
            Metrics of the wait, and of sampling since the last rollout; empty if the run does not sample ahead.

        Raises:
            RolloutError: Sampling failed.
        """
        if self._ahead is None:
            yield Metrics()
        else:
            with self._ahead.pause(version, num_left):
                yield self._ahead.metrics

    def settle(self, all_gather: AllGather) -> DataCursor:
        """Return the cursor after a rollout, the same on every rank; call it on all ranks, after `next`."""
        if self._ahead is not None:
            return self._ahead.cursor
        return self._scheduler.settle(self._stream, all_gather(self._scheduler.out_of_order))

    def evaluate(self, rollout: int, folder: Path) -> dict[str, list[PromptScore]]:
        """Score this rank's share of each evaluation set, and write the responses to files in `folder`.

        A response that was dropped, because its reward failed or for another reason, still counts: it earns the
        set's lowest reward, and at most 0 (`scores.worst_reward`).
        """
        return {
            each.name: self._evaluation.run(each, rollout, responses_file(folder, each.name, rollout))
            for each in self._evaluation.sets
        }

    def close(self) -> None:
        """End sampling ahead, and the processes of rewards and environments."""
        with closing(self._sampler), closing(self._rewards):
            if self._ahead is not None:
                self._ahead.close()
