"""Runs the rollout half of a run: engine, prompts, rewards, and the supply of rollouts."""

import copy
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import end_tokens, read_model_config
from megatron_dppo.config.rollout import FixedLag
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.prompts import PromptStream, load_training_prompts
from megatron_dppo.engines.base import RolloutEngine, SamplingParams
from megatron_dppo.engines.embedded.engine import TransformersEngine
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.model import served_model
from megatron_dppo.engines.sglang.records import api_key, require_registered
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.rewards import RewardChoice
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.evaluation import Evaluation, evaluation_sets, responses_file
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scheduling import AllGather, RunUnlessAsked, Scheduler, run_to_end
from megatron_dppo.rollout.scores import PromptScore
from megatron_dppo.rollout.scoring import OverlongShaping, RewardPools, Scorer, training_reward
from megatron_dppo.rollout.staleness import StalenessBound
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.routing_replay.routes import validate_routes
from megatron_dppo.types import DataCursor, SampleGroup

_SMALLEST_GROUP = 2  # one sample has nothing to compare with


def build_engine(config: Config, hf_folder: Path, device: torch.device) -> RolloutEngine:
    """Build the engine of rollout.engine without weights, for the model config in `hf_folder`."""
    if config.rollout.engine == "sglang":
        return _sglang_engine(config, hf_folder)
    model_config: Any = cast(Any, AutoConfig).from_pretrained(hf_folder, trust_remote_code=False)
    if model_config.get_text_config() is not model_config:
        model_config = model_config.get_text_config().from_dict(read_model_config(hf_folder)[1])
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
    ids = read_model_config(hf_folder)[1].get("eos_token_id")
    patience = Patience(generate_timeout_s=options.request_timeout_s, max_attempts=options.max_attempts)
    return SglangEngine(
        [record.url for record in records],
        served_model(hf_folder, end_tokens(hf_folder, ids)),
        patience,
        max_concurrent_requests=options.max_concurrent_requests,
        api_key=api_key(),
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
        self.tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(hf_folder, trust_remote_code=False)
        rewards = [training_reward(config), *(each.reward for each in evaluation_sets(config))]
        self._rewards = RewardPools(config.data, rewards)
        self._sampler = TrajectorySampler(config.rollout, config.data, engine, hf_folder)
        columns = config.data.prompt_column, config.data.answer_column
        self._data = load_training_prompts(config.data.prompts, *columns)
        self._evaluation = Evaluation(config, self._sampler, self.tokenizer, self._rewards, share=share)
        self._counted, self._refused = engine.counts, Counter(engine.refusals)
        self._routing = read_model_sizes(hf_folder).routing
        self._scheduler = self._make_scheduler(cursor=None)
        first = self._data.prompts[0]
        self._rewards.start(self._evaluation.first_prompts | {training_reward(config): first})
        self._sampler.start(first)

    def _make_scheduler(self, cursor: DataCursor | None) -> Scheduler:
        config, options = self._config, self._config.rollout
        data = self._data
        stream = PromptStream(data.prompts, config.run.seed, config.data.shuffle, cursor, data.parts)
        bound = StalenessBound(
            options.prompts_per_rollout, options.staleness.max_versions, options.over_sampling
        )
        producer = Producer(
            *self._parts(copy.deepcopy(self.tokenizer)),  # for the producer's threads
            stream,
            self._share,
            num_threads=config.data.reward_workers,
            max_replaced=options.max_refills if options.refill_zero_variance else 0,
            in_rounds=bound.takes_all,
        )
        return Scheduler(bound, producer, min(_SMALLEST_GROUP, options.samples_per_prompt))

    def _parts(self, tokenizer: Any) -> tuple[GroupMaker, GroupSampler]:
        options, config, routing = self._config.rollout, self._config, self._routing
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
        reward = training_reward(config)
        overlong, buffer_tokens = None, config.data.overlong_buffer_tokens
        if buffer_tokens:
            overlong = OverlongShaping(options.max_response_tokens, buffer_tokens, config.data.overlong_penalty)
        scorer = Scorer(
            tokenizer,
            self._rewards.of(reward),
            params.capture_routes,
            validate,
            overlong,
            scores_groups=RewardChoice.read(reward).scores_groups,
        )
        return maker, self._sampler.sampler(tokenizer, scorer, params)

    @property
    def prompts_digest(self) -> str:
        """Digest of all prompts in order, with answers and ids; a cursor is valid only with the same digest."""
        return self._data.digest

    @property
    def cursor(self) -> DataCursor:
        """Cursor after the last rollout, equal on every rank; it repeats the prompts of open groups first."""
        return self._scheduler.cursor

    def seek(self, cursor: DataCursor) -> None:
        """Continue from a checkpoint's cursor, and drop all open groups; call it between two rollouts."""
        self._scheduler.close()
        self._scheduler = self._make_scheduler(cursor)

    def next(
        self,
        rollout: int,
        version: int,
        all_gather: AllGather,
        run_unless_asked: RunUnlessAsked = run_to_end,
    ) -> tuple[list[SampleGroup], RolloutCounts, Metrics] | None:
        """Return this rank's share of the next rollout; every rank calls it together.

        If `rollout.max_staleness` is set, it waits until a rollout may be trained on. Otherwise it samples one.

        Args:
            rollout: Index of the rollout.
            version: Version of the weights that train next, which the engine has too.
            all_gather: Gathers a value from all ranks.
            run_unless_asked: Runs work unless this rank is asked to stop.

        Returns:
            Groups with rewards but without advantages, counts of everything that was sampled since the call
            before, and metrics of staleness. None on all ranks if any rank is asked to stop.
        """
        if isinstance(self._config.rollout.staleness, FixedLag):  # without what evaluations sampled meanwhile
            self._counted, self._refused = self._engine.counts, Counter(self._engine.refusals)
        taken = self._scheduler.next(rollout, version, all_gather, run_unless_asked)
        if taken is None:
            return None
        groups, counts = taken
        before, self._counted = self._counted, self._engine.counts
        refused_before, self._refused = self._refused, Counter(self._engine.refusals)
        metrics = self._scheduler.metrics
        for name, epochs in self._scheduler.epochs.items():
            metrics.add_max(f"source/{name}/epochs", epochs)
        counts = replace(counts, engine=self._counted - before, refusals=self._refused - refused_before)
        return groups, counts, metrics

    @contextmanager
    def pause(self, version: int, num_left: int) -> Generator[Metrics]:
        """Pause sampling while the body pushes weights; then resume with the new weights.

        Args:
            version: Version of the pushed weights.
            num_left: Number of rollouts that the run still needs.

        Returns:
            Metrics of the wait, and of sampling since the last rollout; empty if the run does not sample ahead.
        """
        with self._scheduler.pause(version, num_left):
            yield self._scheduler.metrics

    def evaluate(self, rollout: int, folder: Path) -> tuple[dict[str, list[PromptScore]], Mapping[str, int]]:
        """Score this rank's share of each evaluation set, and write the responses to files in `folder`.

        A response that was dropped, because its reward failed or for another reason, still counts: it earns the
        set's lowest reward, and at most 0 (`scores.worst_reward`). Also returns the number of responses that
        were refused meanwhile, by the server's URL.
        """
        before = Counter(self._engine.refusals)
        scores = {
            each.name: self._evaluation.run(each, rollout, responses_file(folder, each.name, rollout))
            for each in self._evaluation.sets
        }
        return scores, Counter(self._engine.refusals) - before

    def close(self) -> None:
        """End sampling ahead, and the processes of rewards and environments."""
        with closing(self._sampler), closing(self._rewards):
            self._scheduler.close()
