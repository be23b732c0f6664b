"""The rollout side of a run: engine, prompts and reward, and this rank's share of each rollout."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.prompts import PromptsDigest, PromptStream, load_prompts
from megatron_dppo.rollout.counts import RolloutCounts
from megatron_dppo.rollout.embedded.engine import TransformersEngine
from megatron_dppo.rollout.engine import RolloutEngine, SamplingParams
from megatron_dppo.rollout.evaluation import Evaluation, evaluation_sets, responses_file
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.overlong import OverlongShaping
from megatron_dppo.rollout.reward_pools import RewardPools, training_reward
from megatron_dppo.rollout.scheduler import RankPlaces, RolloutScheduler
from megatron_dppo.rollout.scores import PromptScore
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.rollout.sglang.client import Patience
from megatron_dppo.rollout.sglang.engine import SglangEngine
from megatron_dppo.rollout.sglang.model import served_model
from megatron_dppo.rollout.sglang.server import API_KEY, require_registered
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.routing_replay.capture import validate_routes
from megatron_dppo.types import DataCursor, ModelRouting, SampleGroup


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
