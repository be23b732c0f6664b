"""Tries an objective on a small batch, before training with it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_dppo.algorithms.divergence import TopKLogProbs
from megatron_dppo.algorithms.inputs import PolicyLossInputs, place_of_tokens
from megatron_dppo.algorithms.loss import PolicyLossOutput, policy_loss
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.own_rule import Option, Own, RuleAnswer
from megatron_dppo.algorithms.shadow import rule_values

RESPONSES = (7, 1, 12)  # tokens of each
VOCABULARY = 128


def try_objective(objective: Objective, farthest: float = 1.5) -> PolicyLossOutput:
    """Return the loss of three short synthetic responses, which are always the same.

    They have positive, negative and zero advantages, and tokens that do not learn. The policy moved from the
    rollout's in both directions, by small and by large amounts.

    Args:
        objective: Objective with a built-in or a custom rule.
        farthest: Standard deviation of the logits' change at the last token; 0 for a policy that has not moved.
    """
    inputs = _inputs(objective, farthest)
    rule_values(objective, inputs)
    return policy_loss(objective, inputs)


def names_of_values(objective: Objective) -> tuple[str, ...]:
    """Return the names of the values that a custom rule returns for that batch."""
    return tuple(rule_values(objective, _inputs(objective, farthest=1.5)))


def _inputs(objective: Objective, farthest: float) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(RESPONSES)
    logits = 2 * torch.randn(num_tokens, VOCABULARY, generator=generator)
    moved = torch.linspace(0.0, farthest, num_tokens)[:, None] * torch.randn(logits.shape, generator=generator)
    rollout, policy = logits.log_softmax(1), (logits + moved).log_softmax(1)  # equal if nothing has moved
    targets = torch.multinomial(rollout.exp(), 1, generator=generator)
    topk = rollout.topk(min(objective.top_k, VOCABULARY))
    places = [place_of_tokens(mask) for mask in torch.split(_learns(), list(RESPONSES))]
    return PolicyLossInputs(
        log_probs=policy.gather(1, targets)[:, 0],
        rollout_log_probs=rollout.gather(1, targets)[:, 0],
        advantages=_advantages(),
        loss_mask=_learns(),
        old_log_probs=(logits + 0.1 * moved).log_softmax(1).gather(1, targets)[:, 0],
        ref_log_probs=rollout.gather(1, targets)[:, 0],
        topk=TopKLogProbs(topk.indices, topk.values, policy.gather(1, topk.indices)),
        targets=targets[:, 0],
        entropy=-(policy.exp() * policy).sum(1),
        response_lengths=torch.tensor(RESPONSES),
        positions=torch.cat([positions for positions, _ in places]),
        lengths=torch.cat([lengths for _, lengths in places]),
    )


def _advantages() -> torch.Tensor:
    of_responses = torch.tensor([1.0, 0.0, -1.0]).repeat_interleave(torch.tensor(RESPONSES))
    return of_responses * torch.tensor([1.0, -0.5]).repeat(len(of_responses) // 2)


def _learns() -> torch.Tensor:
    return torch.arange(sum(RESPONSES)) % 5 != 0


class _Watched(Mapping[str, Option]):
    """Options that remember which of them were read."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        self._options, self.unread = dict(options), set(options)

    def __getitem__(self, name: str) -> Option:
        self.unread.discard(name)
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


def doubts(objective: Objective) -> list[str]:
    """Return sentences on likely mistakes of a custom rule on the same batch, which are not errors.

    An option that the rule did not read may be misspelt. A rule that keeps no token leaves nothing to learn.

    Raises:
        ConfigError: The rule fails, as in `try_objective`.
    """
    if not isinstance(objective, Own):
        return []
    own, options = objective.function, _Watched(objective.rule_options)

    def watching(tokens: Any, _: Mapping[str, Option]) -> RuleAnswer:
        return own.function(tokens, options)

    watched = replace(objective, function=replace(own, function=watching))
    keeps = {farthest: _keeps_any(try_objective(watched, farthest)) for farthest in (1.5, 0.0)}
    found: list[str] = []
    if options.unread:
        names, noun = ", ".join(sorted(options.unread)), "option" if len(options.unread) == 1 else "options"
        found.append(
            f"{objective.name} did not read the {noun} {names} on a small batch: is the name right? "
            "A rule that declares its options with @rule_options refuses others."
        )
    if not all(keeps.values()):
        which = " whose policy has moved" if keeps[0.0] else " whose pi equals mu" if keeps[1.5] else ""
        found.append(
            f"{objective.name} drops every token of a small batch{which}: nothing is left to learn. "
            "Loosen its threshold, or correct the function."
        )
    return found


def _keeps_any(output: PolicyLossOutput) -> bool:
    """Whether a token that learns and has an advantage keeps its update."""
    acts = _learns() & (_advantages() != 0)
    return bool((output.weight[acts] != 0).any())
