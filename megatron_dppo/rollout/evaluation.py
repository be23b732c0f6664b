"""Evaluates on sets of held-out prompts, each with its own sampling settings, and saves every response."""

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.prompts import Drawn, load_prompts
from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.rewards import RewardChoice
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup
from megatron_dppo.rollout.scores import (
    PromptScore,
    metric_names,
    not_asked,
    powers_of_two,
    refuse_if_too_many_dropped,
    score_of,
    set_metrics,
)
from megatron_dppo.rollout.scoring import Fault, RewardPools, Scorer, Tokenizer, as_text, ids_of
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.runtime.files import read_jsonl, write_jsonl
from megatron_dppo.types import Prompt

_NOISE = 1 << 36  # rollout numbers above it key the noise of evaluations, which training never draws


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set with its resolved settings from [evaluation]."""

    name: str
    prompts: tuple[Path, ...]  # its files
    samples_per_prompt: int
    temperature: float
    top_p: float
    max_response_tokens: int
    reward: str  # a RewardChoice.text; correct is 1 and wrong is 0, whatever values training uses
    pass_at: tuple[int, ...]

    @property
    def metric_names(self) -> list[str]:
        """Names of the set's metrics; the first is its score."""
        return metric_names(self.name, self.samples_per_prompt, self.pass_at)

    @property
    def noise_offset(self) -> int:
        """Noise offset from the set's name, so that samples do not depend on the other sets."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=3).digest()
        return _NOISE * (1 + int.from_bytes(digest, "big"))

    def metrics(self, scores: Sequence[PromptScore], seed: int) -> dict[str, float]:
        """Return the set's metrics, given the scores of all its prompts in their order."""
        n = self.samples_per_prompt
        return set_metrics(self.name, scores, self.pass_at, samples_per_prompt=n, seed=seed)

    def refuse_if_too_many_dropped(
        self, scores: Sequence[PromptScore], max_fraction: float, refusals: Mapping[str, int]
    ) -> None:
        """Raise if too many responses have no reward; see `scores.refuse_if_too_many_dropped`."""
        refuse_if_too_many_dropped(self.name, scores, max_fraction, refusals)


def evaluation_sets(config: Config) -> list[EvaluationSet]:
    """Return the sets of [evaluation], in the config's order. The list is empty if evaluation.every is 0."""
    options = config.evaluation
    sets: list[EvaluationSet] = []
    for name, own in options.used_sets.items():
        num_samples = own.samples_per_prompt or options.samples_per_prompt
        longest = own.max_response_tokens or options.max_response_tokens
        each = EvaluationSet(
            name=name,
            prompts=tuple(file.path for file in own.prompts),
            samples_per_prompt=num_samples,
            temperature=options.temperature if own.temperature is None else own.temperature,
            top_p=own.top_p or options.top_p,
            max_response_tokens=longest or config.rollout.max_response_tokens,
            reward=RewardChoice(
                own.reward or config.data.reward,
                thinking=config.data.thinking,
                retries=config.data.reward_retries,
            ).text,
            pass_at=powers_of_two(num_samples) if options.pass_at is None else options.pass_at,
        )
        sets.append(each)
    return sets


class Evaluation:
    """Evaluates this rank's share of each evaluation set."""

    def __init__(
        self,
        config: Config,
        sampler: TrajectorySampler,
        tokenizer: Tokenizer,
        rewards: RewardPools,
        *,
        share: tuple[int, int],
    ) -> None:
        """Read the prompts.

        Args:
            config: Config of the run.
            sampler: Sampler, which uses the weights that its engine has when `run` is called; not owned.
            tokenizer: Tokenizer of the engine's model.
            rewards: Pools, one for each set's reward; not owned.
            share: (rank, size) of the job.
        """
        self._config, self._sampler, self._tokenizer = config, sampler, tokenizer
        self._rewards, self._share = rewards, share
        columns = (config.data.prompt_column, config.data.answer_column)
        self.sets = evaluation_sets(config)
        self._prompts = {
            each.name: [prompt for file in each.prompts for prompt in load_prompts(file, *columns)]
            for each in self.sets
        }

    @property
    def first_prompts(self) -> dict[str, Prompt]:
        """One prompt for each set's reward, by reward."""
        return {each.reward: self._prompts[each.name][0] for each in self.sets}

    def run(self, each: EvaluationSet, rollout: int, responses: Path) -> list[PromptScore]:
        """Sample and score this rank's share of a set; communicates with no other rank.

        The sampled tokens depend on run.seed, the set's name, `rollout` and the prompt's index in its set. They
        do not depend on other sets, on the number of ranks, or on earlier samples.

        Args:
            each: Evaluation set.
            rollout: Number of rollouts finished before; part of the noise key.
            responses: File that `merge_responses` writes. This rank's part is written next to it.
        """
        (rank, size), prompts = self._share, self._prompts[each.name]
        places = [(index, prompts[index]) for index in range(rank, len(prompts), size)]
        limits = each.samples_per_prompt, self._config.data.max_prompt_tokens, self._config.run.seed
        maker = GroupMaker(self._tokenizer, *limits, self._sampler.environments)
        scorer = Scorer(
            self._tokenizer,
            self._rewards.of(each.reward),
            needs_routes=False,
            validate_routes=None,
            scores_groups=RewardChoice.read(each.reward).scores_groups,
        )
        params = SamplingParams(each.max_response_tokens, each.temperature, each.top_p)
        drawn = [(index, Drawn(index, prompt)) for index, prompt in places]
        groups = maker.begin(each.noise_offset + rollout, drawn)
        self._sampler.sampler(self._tokenizer, scorer, params).sample(groups)
        write_jsonl(_part(responses, self._share), _rows(groups, self._tokenizer))
        scores = {group.index: score_of(group) for group in groups}
        return [scores.get(index) or not_asked(index, each.samples_per_prompt) for index, _ in places]


def responses_file(folder: Path, name: str, rollout: int) -> Path:
    """Return the path of the file with all responses to a set in the evaluation after `rollout` rollouts."""
    return folder / f"{name}_{rollout:06d}.jsonl"


def merge_responses(responses: Path, num_ranks: int) -> None:
    """Merge the parts of all ranks into one file, in the order of the set's prompts."""
    parts = [_part(responses, (rank, num_ranks)) for rank in range(num_ranks)]
    rows = ((row for _, row in read_jsonl(part)) for part in parts)
    write_jsonl(responses, heapq.merge(*rows, key=lambda row: (row["index"], row["sample"])))
    for part in responses.parent.glob(f".{responses.name}.rank_*"):  # also parts of an interrupted evaluation
        part.unlink()


def _part(responses: Path, share: tuple[int, int]) -> Path:
    return responses.with_name(f".{responses.name}.rank_{share[0]}_of_{share[1]}")


def _rows(groups: Sequence[PromptGroup], tokenizer: Tokenizer) -> Iterable[dict[str, object]]:
    """Yield a row for every response: its text, and its reward or the reason why it has none."""
    for group in groups:
        for number, (sample, scored) in enumerate(zip(group.sampled, group.responses, strict=True)):
            assert scored is not None, "every response is scored"
            tokens = ids_of(sample.tokens)
            question, response = tokens[: sample.prompt_length], tokens[sample.prompt_length :]
            yield {
                "index": group.index,
                "prompt_id": group.drawn.prompt.id,
                "sample": number,
                "prompt": as_text(tokenizer, question, has_special_tokens=True),
                "response": as_text(tokenizer, response, has_special_tokens=True),
                "answer": group.drawn.prompt.answer,
                "reward": None if isinstance(scored, Fault) else scored.reward,
                "reward_info": {} if isinstance(scored, Fault) else dict(scored.reward_info),
                "dropped": scored.reason if isinstance(scored, Fault) else None,
                "finish_reason": sample.finish_reason,
                "prompt_length": sample.prompt_length,
                "response_length": sample.response_length,
            }
