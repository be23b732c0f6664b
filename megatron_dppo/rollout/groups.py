"""Groups of responses to one prompt: their requests, sampling, scoring, and counts of what was dropped.

Each rank makes the groups in its share of a rollout, without communication. The loop sums the counts over
ranks and then calls `refuse_if_too_many_dropped`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_dppo.algorithms import have_equal_rewards
from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.data.prompts.templates import prompt_tokens
from megatron_dppo.engines.base import Request, give_up, with_prompt
from megatron_dppo.environments import (
    EnvironmentFault,
    Environments,
    Episode,
    InProcess,
    Observation,
    SingleTurn,
    Trajectory,
)
from megatron_dppo.rollout.counts import DROP_REASONS, RolloutCounts
from megatron_dppo.rollout.scoring import Fault, Tokenizer, as_text, ids_of
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.types import AgentCall, Message, Prompt, Sample, SampleGroup


@dataclass(eq=False)
class PromptGroup:
    """A prompt and its requested responses: open until each is sampled or given up, and scored."""

    drawn: Drawn
    index: int  # the prompt's index, over all ranks, in the rollout that began it or trains on it
    requests: list[Request]
    responses: list[Sample | Fault | None]
    # one per request: None until it is sampled; a sample, without a reward until it is scored; or its fault
    left_out: list[Sample] = field(default_factory=list[Sample])  # faulty further samples of sound episodes
    born: int | None = None  # version of the weights that may sample its first token; None before
    has_tokens: bool = False  # while it has no tokens and is not whole, a push resets `born`
    is_being_scored: bool = False  # whether a reward of whole groups has got the responses
    interrupted: set[str] = field(default_factory=set[str])  # ids of requests that a hold left with tokens

    def keep(self, index: int, scored: Sample | Fault, branches: Sequence[Sample] = ()) -> None:
        """Replace a response by its scored sample with the branches that can be trained on, or by its fault."""
        sample = self.responses[index]
        assert isinstance(sample, Sample), "a response is sampled before it is scored"
        if isinstance(scored, Fault):
            self.responses[index] = replace(scored, sample=sample)
            return
        kept = {each.id for each in branches}
        self.left_out += [each for each in sample.branches if each.id not in kept]
        self.responses[index] = replace(scored, branches=tuple(branches))

    @property
    def is_sampled(self) -> bool:
        """Whether every response is sampled or given up."""
        return None not in self.responses

    @property
    def is_whole(self) -> bool:
        """Whether every response is sampled or given up, and scored."""
        return len(self.samples) + len(self.faults) == len(self.responses)

    @property
    def sampled(self) -> list[Sample]:
        """Responses so far, the first sample of each, with those that have a fault."""
        found = [each.sample if isinstance(each, Fault) else each for each in self.responses]
        return [each for each in found if each is not None]

    @property
    def all_sampled(self) -> list[Sample]:
        """Responses so far, with the further samples of agents' episodes."""
        return [part for each in self.sampled for part in (each, *each.branches)] + self.left_out

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples that can be trained on, the first one of each request."""
        return tuple(each for each in self.responses if isinstance(each, Sample) and each.reward is not None)

    @property
    def all_samples(self) -> tuple[Sample, ...]:
        """Samples that can be trained on, with the further ones of agents' episodes, as a batch takes them."""
        parts = (part for each in self.samples for part in (each, *each.branches))
        return tuple(replace(part, branches=(), episode=None) for part in parts)

    @property
    def calls(self) -> dict[str, tuple[AgentCall, ...]]:
        """Calls of the episodes that can be trained on, by the first sample's id."""
        episodes = {each.id: each.episode for each in self.samples}
        return {name: episode.calls for name, episode in episodes.items() if episode and episode.calls}

    @property
    def faults(self) -> list[Fault]:
        """Faults of the samples that cannot be trained on."""
        return [each for each in self.responses if isinstance(each, Fault)]

    @property
    def has_zero_variance(self) -> bool:
        """Whether all rewards are equal up to rounding, so that no sample learns; False without rewards."""
        rewards = [float(sample.reward or 0.0) for sample in self.samples]
        return bool(rewards) and have_equal_rewards(rewards)


@dataclass(frozen=True)
class GroupMaker:
    """Makes the groups of requests for prompts."""

    tokenizer: Tokenizer
    samples_per_prompt: int
    max_prompt_tokens: int
    seed: int
    environments: Environments = field(default_factory=lambda: InProcess(SingleTurn))

    def begin(self, rollout: int | None, places: Sequence[tuple[int, Drawn]]) -> list[PromptGroup]:
        """Make groups of requests for prompts; drop prompts that are too long.

        If an environment's `reset` fails, its group is whole at once, and all its responses count as given up.

        Args:
            rollout: Index of the rollout; None if the groups begin before it is known which rollout takes them.
            places: Prompts with their index in the rollout, or in the stream if there is no rollout yet.
        """
        begun = "place" if rollout is None else f"rollout{rollout}/"
        trajectories = [Trajectory(f"{begun}{index}", drawn.prompt) for index, drawn in places]
        openings = self.environments.reset(trajectories)
        groups = list[PromptGroup]()
        for (index, drawn), trajectory, opening in zip(places, trajectories, openings, strict=True):
            start = index * self.samples_per_prompt
            # The first sample's number is part of the name, because a prompt may occur twice in one rollout.
            name = trajectory.id if rollout is None else f"{begun}{drawn.prompt.id}/{start}"
            tokens = self._tokens(drawn.prompt, opening)
            if len(tokens) > self.max_prompt_tokens:
                continue
            messages = opening.messages if isinstance(opening, Observation) else None
            first_key = (self.seed, rollout or 0, start)
            requests = _requests(name, drawn.prompt, tokens, first_key, self.samples_per_prompt, messages)
            fault = opening if isinstance(opening, EnvironmentFault) else None
            responses = [_lost(request, fault) if fault else None for request in requests]
            groups.append(PromptGroup(drawn, index, requests, [*responses]))
        return groups

    def _tokens(self, prompt: Prompt, opening: Observation | EnvironmentFault) -> tuple[int, ...]:
        if isinstance(opening, EnvironmentFault):
            return ()
        options = (prompt.tools, prompt.template_arguments)
        return prompt_tokens(self.tokenizer, opening.text, opening.messages, *options)


def write_samples(path: Path, groups: Sequence[SampleGroup], tokenizer: Tokenizer) -> None:
    """Write the samples as text, one JSON object per line. The file is either complete or absent."""
    rows = (
        _readable(group.prompt, sample, tokenizer)
        | ({"calls": [asdict(call) for call in group.calls[sample.id]]} if sample.id in group.calls else {})
        for group in groups
        for sample in group.samples
    )
    write_jsonl(path, rows)


def usable_groups(
    scored: Sequence[PromptGroup],
    replaced: Sequence[PromptGroup],
    smallest_group: int,
    *,
    num_too_long: int,
    weight_version: int,
    rest: Sequence[PromptGroup] = (),
) -> tuple[list[SampleGroup], RolloutCounts]:
    """Return the groups to train on, without advantages yet, and counts of everything that was sampled.

    Args:
        scored: Groups to train on, if they are large enough.
        replaced: Groups with equal rewards that groups of `scored` have replaced.
        smallest_group: Minimum number of sound samples of a group.
        num_too_long: Number of prompts that were too long to sample.
        weight_version: Version of the engine's weights.
        rest: Unfinished groups that are dropped, because enough others were whole before.
    """
    kept = [group for group in scored if len(group.samples) >= smallest_group]
    everything = [*scored, *replaced]
    responses = [each for group in everything for each in group.sampled]
    sampled = [each for group in everything for each in group.all_sampled]
    faults = [fault for group in everything for fault in group.faults]
    episodes = [each.episode for each in responses if each.episode is not None]
    counts = RolloutCounts(
        num_prompts=len(everything) + num_too_long,
        num_prompts_too_long=num_too_long,
        num_samples=len(responses),
        num_truncated=sum(each.finish_reason == "length" for each in responses),
        num_turns=sum(each.episode.num_turns if each.episode else 1 for each in responses),
        num_response_tokens=sum(each.response_length for each in sampled),
        num_old_tokens=sum(_num_old_tokens(each, weight_version) for each in sampled),
        num_requeued=sum(each.num_moves for each in responses),
        num_retractions=sum(each.num_retractions for each in responses),
        num_recomputed_routes=sum(
            sample.num_retractions > 0 and sample.routed_experts is not None
            for group in everything
            for sample in group.samples
        ),
        num_continued=sum(len({span.version for span in each.weight_versions}) > 1 for each in sampled),
        num_discarded_partials=sum(
            request.id in group.interrupted and response is None
            for group in rest
            for request, response in zip(group.requests, group.responses, strict=True)
        ),
        num_replaced_groups=len(replaced),
        num_dropped_groups=len(scored) - len(kept),
        num_left_alone=sum(len(group.samples) for group in scored) - sum(len(group.samples) for group in kept),
        num_agent_calls=sum(episode.num_calls for episode in episodes),
        num_agent_forks=sum(episode.num_forks for episode in episodes),
        num_agent_branches=sum(len(group.all_samples) - len(group.samples) for group in everything),
        num_untrained_tokens=sum(episode.num_untrained_tokens for episode in episodes)
        + sum(int(each.loss_mask.sum()) for group in everything for each in group.left_out),
        num_dropped={reason: sum(fault.reason == reason for fault in faults) for reason in DROP_REASONS},
        example=str(faults[0]) if faults else None,
    )
    return [
        SampleGroup(group.drawn.prompt, group.all_samples, group.index, group.calls) for group in kept
    ], counts


def _num_old_tokens(sample: Sample, weight_version: int) -> int:
    return sum(span.stop - span.start for span in sample.weight_versions if span.version != weight_version)


def _readable(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> dict[str, object]:
    tokens = ids_of(sample.tokens)
    question, response = tokens[: sample.prompt_length], tokens[sample.prompt_length :]
    return {
        "id": sample.id,
        "prompt_id": prompt.id,
        "prompt": as_text(tokenizer, question, has_special_tokens=True),
        "response": as_text(tokenizer, response, has_special_tokens=True),
        "answer": prompt.answer,
        "reward": sample.reward,
        "reward_info": dict(sample.reward_info),
        "advantage": sample.advantage,
        "finish_reason": sample.finish_reason,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
    }


def _lost(request: Request, fault: EnvironmentFault) -> Sample:
    return replace(with_prompt(give_up(request), request), episode=Episode("", 0, fault=fault.message))


def _requests(
    name: str,
    prompt: Prompt,
    tokens: tuple[int, ...],
    first_key: tuple[int, int, int],
    count: int,
    messages: tuple[Message, ...] | None,
) -> list[Request]:
    """Return the requests `<name>+0`, `<name>+1`, ... of one group.

    No id is a prefix of another one, because SGLang aborts all requests with ids that begin with a given id.
    """
    seed, rollout, start = first_key
    ids = [f"{name}+{k:0{len(str(count - 1))}d}" for k in range(count)]
    keys = [(seed, rollout, start + k) for k in range(count)]
    pairs = zip(ids, keys, strict=True)
    is_chat = messages is not None
    return [Request(id, tokens, key, prompt=prompt, is_chat=is_chat, messages=messages) for id, key in pairs]
