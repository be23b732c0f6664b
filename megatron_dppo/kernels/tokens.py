"""What a fused loss knows of each token beside its logits, checked and in the kernels' types."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs, TopKLogProbs
from megatron_dppo.algorithms.inputs import learning_tokens
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.arguments import MAX_TOP_K
from megatron_dppo.kernels.vocab_parallel import VocabShard, require_cover


@dataclass(frozen=True, eq=False)
class LossTokens:
    """Per token, [T] or [T, K]; tensors are contiguous, real ones of one dtype."""

    targets: Tensor  # [T] int64, global ids
    rollout_log_probs: Tensor  # [T]
    advantages: Tensor  # [T]
    loss_mask: Tensor | None  # [T] bool; none: all learn
    token_weights: Tensor | None  # [T]
    topk_ids: Tensor | None  # [T, K] int32
    topk_rollout_log_probs: Tensor | None  # [T, K]
    old_log_probs: Tensor | None  # [T], where the objective's anchor is recomputed

    def learning(self, which: Tensor | slice) -> "LossTokens":
        """Those tokens alone, all of which learn."""
        chosen: dict[str, Any] = {}
        for field in fields(self):
            values = getattr(self, field.name)
            chosen[field.name] = None if values is None else values[which]
        return replace(self, **chosen | {"loss_mask": None})


def loss_tokens(
    objective: Objective,
    num_tokens: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    targets: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor | None = None,
    token_weights: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_rollout_log_probs: Tensor | None = None,
    old_log_probs: Tensor | None = None,
) -> LossTokens:
    """The tokens of a loss, after checks that need no value of a tensor; unused top-K columns are left out.

    T is `num_tokens`; `dtype` is float32, or float64 where the logits are; the rest is as `fused_policy_loss`
    takes it.

    Raises:
        ConfigError: An input is missing, or of another shape or type; all faults at once. Or the kernels of the
            tensors' device are compiled and do not know the objective.
    """
    ops.require_known(objective, targets)
    given: dict[str, Tensor | None] = {
        "targets": targets,
        "rollout_log_probs": rollout_log_probs,
        "advantages": advantages,
        "loss_mask": loss_mask,
        "token_weights": token_weights,
        "topk_ids": topk_ids,
        "topk_rollout_log_probs": topk_rollout_log_probs,
        "old_log_probs": old_log_probs if objective.anchor == "recomputed" else None,
    }
    problems = [*_missing(objective, given), *_misshapen(given, num_tokens)]
    if not problems and topk_ids is not None:
        problems = _too_few_or_many(objective, topk_ids.shape[1], vocab_size)
    if problems:
        raise ConfigError(problems)
    integers = {"targets": torch.int64, "topk_ids": torch.int32, "loss_mask": torch.bool}
    used = slice(None, objective.top_k if objective.needs_topk else None)
    topk_columns = 0 if topk_ids is None else topk_ids.shape[1]
    ready: dict[str, Any] = {}
    for name, values in given.items():
        if values is not None:
            values = values[:, used] if name.startswith("topk") else values
            values = values.detach().to(integers.get(name, dtype)).contiguous()
        ready[name] = None if name.startswith("topk") and topk_columns == 0 else values
    return LossTokens(**ready)


def check_values(objective: Objective, tokens: LossTokens, shard: VocabShard, width: int) -> None:
    """Refuse values that no learning token may have, and shards of `width` columns that leave some out.

    One exchange between the shards, and three device synchronisations where all is well.

    Raises:
        ConfigError: Naming the tensor, the row and the value.
    """
    require_cover(shard, width, tokens.targets.device)
    _require_known_ids(tokens, shard.vocab_size)
    topk, mu = None, tokens.topk_rollout_log_probs
    if tokens.topk_ids is not None and mu is not None:
        topk = TopKLogProbs(tokens.topk_ids, mu, torch.zeros_like(mu))
    inputs = PolicyLossInputs(
        log_probs=torch.zeros_like(tokens.rollout_log_probs),
        rollout_log_probs=tokens.rollout_log_probs,
        advantages=tokens.advantages,
        loss_mask=tokens.loss_mask,
        old_log_probs=tokens.old_log_probs,
        topk=topk,
        targets=tokens.targets,
        token_weights=tokens.token_weights,
        entropy=torch.zeros_like(tokens.rollout_log_probs),
    )
    learning_tokens(objective, inputs)


def _require_known_ids(tokens: LossTokens, vocab_size: int) -> None:
    is_learning = (
        torch.ones_like(tokens.targets, dtype=torch.bool) if tokens.loss_mask is None else tokens.loss_mask
    )
    is_bad = is_learning & ((tokens.targets < 0) | (tokens.targets >= vocab_size))
    found = {"targets": (tokens.targets[:, None], is_bad[:, None])}
    if tokens.topk_ids is not None:
        is_outside = (tokens.topk_ids < -1) | (tokens.topk_ids >= vocab_size)
        found["topk_ids"] = (tokens.topk_ids, is_outside & is_learning[:, None])
    if not bool(torch.stack([is_bad.any() for _, is_bad in found.values()]).any()):
        return
    problems: list[Problem] = []
    for name, (ids, is_bad) in found.items():
        if bool(is_bad.any()):
            row, column = is_bad.nonzero()[0].tolist()
            expected = f"ids below the {vocab_size} of the vocabulary" + (
                ", or -1" if name == "topk_ids" else ""
            )
            action = "Take the ids from the model's tokenizer, or leave the token out with loss_mask."
            problems.append(_problem(name, f"{int(ids[row, column])} in row {row}", expected, action))
    raise ConfigError(problems)


def _problem(name: str, found: str, expected: str, action: str) -> Problem:
    return Problem(f"fused_policy_loss.{name}", found, expected, action)


def _missing(objective: Objective, given: dict[str, Tensor | None]) -> list[Problem]:
    needed: dict[str, str] = {}
    if objective.needs_topk:
        why = f"because the divergence is {objective.divergence}"
        needed |= {"topk_ids": why, "topk_rollout_log_probs": why}
    if objective.anchor == "recomputed":
        needed["old_log_probs"] = "because anchor = 'recomputed'"
    return [
        _problem(name, "none", f"a tensor, {why}", f"Pass {name}=...")
        for name, why in needed.items()
        if given[name] is None
    ]


def _misshapen(given: dict[str, Tensor | None], num_tokens: int) -> list[Problem]:
    integer = "integer numbers"
    kinds = {"targets": integer, "topk_ids": integer, "loss_mask": "bool or integer numbers"}
    ids = given["topk_ids"]
    columns = ids.shape[1:] if ids is not None else None
    problems: list[Problem] = []
    for name, values in given.items():
        if values is None:
            continue
        expected = [num_tokens, *(columns or [])] if name.startswith("topk") and columns else [num_tokens]
        shape = list(values.shape)
        is_right = len(shape) == 2 and shape[0] == num_tokens if name == "topk_ids" else shape == expected
        if not is_right:
            wanted = f"[{num_tokens}, K]" if name.startswith("topk") else f"[{num_tokens}]"
            action = "Pass one row for each row of the logits or hidden states."
            problems.append(_problem(name, f"shape {shape}", wanted, action))
        kind = kinds.get(name, "floating numbers")
        if not _is_kind(values, kind):
            problems.append(_problem(name, str(values.dtype), kind, f"Convert {name} where the batch is made."))
    return problems


def _is_kind(values: Tensor, kind: str) -> bool:
    if values.dtype == torch.bool:
        return kind.startswith("bool")
    return values.is_floating_point() == kind.startswith("floating")


def _too_few_or_many(objective: Objective, num_columns: int, vocab_size: int) -> list[Problem]:
    if objective.needs_topk:
        needed = min(objective.top_k, vocab_size)
        if num_columns < needed:
            action = "Set rollout.num_topk_log_probs to at least algorithm.top_k."
            return [_problem("topk_ids", f"{num_columns} columns", f"at least top_k = {needed}", action)]
        num_columns = min(num_columns, objective.top_k)
    if num_columns > MAX_TOP_K:
        return [_problem("topk_ids", f"{num_columns} columns", f"at most {MAX_TOP_K}", "Use a smaller top_k.")]
    return []
