"""Counts dropped samples by reason; stops a run that drops too many."""

import dataclasses
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_dppo.engines.base import EngineCounts
from megatron_dppo.errors import RolloutError, ServerError

DropReason = Literal[
    "aborted",
    "empty_response",
    "non_finite_log_probs",
    "invalid_routes",
    "retracted",
    "environment_failed",
    "harness_failed",
    "reward_failed",
    "reward_timed_out",
    "reward_out_of_memory",
]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
_BY_SERVERS: tuple[DropReason, ...] = ("aborted", "empty_response", "non_finite_log_probs")


@dataclass(frozen=True)
class RolloutCounts:
    """Counts of a rollout's prompts and samples, kept and dropped, on one rank or summed over all ranks.

    Prompts that are too long are a property of the data, not a fault of the run. They are counted separately,
    no samples are requested for them, and they stop the run only if all prompts are too long. Truncated
    responses and response tokens are counted over all responses of the engine, including dropped samples and
    replaced groups.
    """

    num_prompts: int
    num_prompts_too_long: int
    num_samples: int  # requested from the engine
    num_truncated: int
    num_turns: int  # responses of the policy, over all conversations
    num_response_tokens: int  # observations of environments included
    num_old_tokens: int  # response tokens that older weights sampled, before the response was aborted
    num_requeued: int  # times that a response moved to another server because its server failed
    num_retractions: int  # times that a server dropped a response's cache and computed it again
    num_recomputed_routes: int  # sound samples whose routes a server computed again after a retraction
    num_continued: int  # samples with tokens of several weight versions
    num_discarded_partials: int  # unfinished responses that were dropped once enough groups were whole
    num_replaced_groups: int  # groups with equal rewards that were replaced
    num_dropped_groups: int  # groups with fewer than two samples left
    num_left_alone: int  # sound samples that were dropped with their group
    num_dropped: Mapping[DropReason, int]  # faulty samples by reason; every reason has an entry
    num_agent_calls: int = 0  # responses to calls of agents
    num_agent_forks: int = 0  # of them, those that continue no earlier response, or one that has a continuation
    num_agent_branches: int = 0  # samples of episodes in addition to the first one of each
    num_untrained_tokens: int = 0  # tokens that agents sampled, and no sample trains on
    example: str | None = None  # message of the first fault on this rank
    engine: EngineCounts = field(default_factory=EngineCounts)  # the engine's counts during this rollout
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])  # responses refused, by server's URL

    @property
    def num_dropped_samples(self) -> int:
        """Number of samples dropped because they were faulty."""
        return sum(self.num_dropped.values())

    def to_tensor(self) -> Tensor:
        """Return all counts as int64, for summing over data-parallel ranks."""
        plain = [getattr(self, name) for name in _PLAIN_COUNTS]
        of_reasons = [self.num_dropped[reason] for reason in DROP_REASONS]
        return torch.tensor([*plain, *of_reasons, *astuple(self.engine)])

    def with_totals(self, totals: Tensor, refusals: Mapping[str, int] | None = None) -> "RolloutCounts":
        """Return the counts over all ranks; keeps this rank's example.

        Args:
            totals: Sum of the ranks' `to_tensor`.
            refusals: Sum of their `refusals`; default: this rank's.
        """
        values = [int(value) for value in totals]
        split = len(_PLAIN_COUNTS)
        plain, values = dict(zip(_PLAIN_COUNTS, values[:split], strict=True)), values[split:]
        num_dropped = dict(zip(DROP_REASONS, values, strict=False))
        engine = EngineCounts(*values[len(DROP_REASONS) :])
        refusals = self.refusals if refusals is None else refusals
        return RolloutCounts(
            **plain, num_dropped=num_dropped, example=self.example, engine=engine, refusals=refusals
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts as `rollout/...` metrics, and the engine's as `engine/...`. Call it on totals."""
        num_samples = max(self.num_samples, 1)
        metrics = {
            "rollout/response_length_mean": self.num_response_tokens / num_samples,
            "rollout/num_turns_mean": self.num_turns / num_samples,
            "rollout/truncated_fraction": self.num_truncated / num_samples,
            "rollout/prompts_too_long": float(self.num_prompts_too_long),
            "rollout/dropped_samples": float(self.num_dropped_samples),
            "rollout/dropped_groups": float(self.num_dropped_groups),
            "rollout/replaced_groups": float(self.num_replaced_groups),
            "rollout/discarded_partials": float(self.num_discarded_partials),
            "rollout/continued_samples": float(self.num_continued),
            "rollout/old_token_fraction": self.num_old_tokens / max(self.num_response_tokens, 1),
            "rollout/requeued_requests": float(self.num_requeued),
            "rollout/retractions": float(self.num_retractions),
            "rollout/recomputed_routes": float(self.num_recomputed_routes),
        }
        if self.num_agent_calls:
            metrics |= {
                "agents/calls": float(self.num_agent_calls),
                "agents/forks": float(self.num_agent_forks),
                "agents/branches": float(self.num_agent_branches),
                "agents/untrained_tokens": float(self.num_untrained_tokens),
            }
        metrics |= {f"rollout/dropped_{reason}": float(n) for reason, n in self.num_dropped.items()}
        return metrics | self.engine.metrics()


_PLAIN_COUNTS = tuple(field.name for field in dataclasses.fields(RolloutCounts) if field.type is int)


def refuse_if_too_many_dropped(counts: RolloutCounts, max_fraction: float) -> None:
    """Raise if too many samples were dropped, or if all prompts were too long.

    Call it on totals over all ranks: one rank's share is too small, and ranks must agree on stopping.
    """
    if counts.num_prompts_too_long == counts.num_prompts:
        raise RolloutError(
            f"rollout: found {counts.num_prompts} prompts, all longer than data.max_prompt_tokens; expected "
            "some to sample from. Raise the limit, or shorten the prompts or the text that environments add."
        )
    num_dropped = counts.num_dropped_samples
    if num_dropped <= max_fraction * counts.num_samples:
        return
    by_reason = ", ".join(f"{n} {reason}" for reason, n in counts.num_dropped.items() if n)
    example = counts.example or "none on this rank, see the logs of other ranks"
    found = (
        f"rollout: found {num_dropped} of {counts.num_samples} samples dropped ({by_reason}); expected at most "
        f"{max_fraction:.2%}. First of them: {example}."
    )
    raise error_of_drops(found, counts.num_dropped, max_fraction * counts.num_samples, counts.refusals)


def error_of_drops(
    found: str, num_dropped: Mapping[DropReason, int], most: float, refusals: Mapping[str, int]
) -> RolloutError:
    """Return the error of more than `most` drops, with what to do: a ServerError if servers caused so many."""
    if refusals and sum(num_dropped.get(reason, 0) for reason in _BY_SERVERS) > most:
        by_server = ", ".join(f"{url} {count}" for url, count in sorted(refusals.items()))
        return ServerError(
            f"{found} Refused responses by server: {by_server}. Look at the logs of these servers."
        )
    retries = (
        "set data.reward_retries if the reward fails now and then, " if num_dropped.get("reward_failed") else ""
    )
    return RolloutError(f"{found} Fix the cause, {retries}or raise rollout.max_dropped_fraction.")
