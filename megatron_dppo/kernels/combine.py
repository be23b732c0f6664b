"""The part of a fused loss that has a few numbers per token: its inputs with their checks, and `combine`."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.library import custom_op

from megatron_dppo.algorithms import Objective, PolicyLossInputs
from megatron_dppo.algorithms.loss import learning_tokens
from megatron_dppo.algorithms.loss_terms import OPTIONAL_INPUTS
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels import ops, reference
from megatron_dppo.kernels.encoding import MAX_TOP_K, decode, encode, is_compiled
from megatron_dppo.kernels.reference import ROWS, wide_dtype
from megatron_dppo.kernels.shards import PackedResponses, VocabShard, require_cover
from megatron_dppo.types import ROLLOUT_TOKENS, RolloutTokens, RolloutTopK, each_token


def checked_tokens(
    objective: Objective,
    tokens: RolloutTokens,
    output: Float[Tensor, "rows columns"],
    num_tokens: int,
    vocab_size: int,
) -> RolloutTokens:
    """Return the tokens of a loss in the kernels' types, contiguous, after the checks of `require_tokens`.

    Unused Top-K columns, and the optional inputs that the objective does not read, are left out. Numbers are
    float32, or float64 if `output`, the logits or hidden states, is. Other arguments: see `require_tokens`.
    """
    dtype = wide_dtype(output)
    known: dict[str, Any] = {name: getattr(tokens, name) for name in ROLLOUT_TOKENS}
    known |= {name: None for name in OPTIONAL_INPUTS if name not in objective.inputs_of_terms}
    if objective.anchor != "recomputed":
        known["old_log_probs"] = None
    if objective.own is None:
        known |= {"positions": None, "lengths": None}
    tokens = RolloutTokens(**known)
    require_tokens(objective, tokens, num_tokens, vocab_size)
    topk, mask = tokens.topk, tokens.loss_mask
    if topk is not None:
        used = slice(None, objective.top_k if objective.needs_topk else None)
        ids, log_probs = topk.ids[:, used].to(torch.int32), topk.log_probs[:, used]
        topk = RolloutTopK(ids, log_probs) if topk.ids.shape[1] else None
    tokens = replace(
        tokens,
        targets=tokens.targets.to(torch.int64),
        loss_mask=None if mask is None else mask.bool(),
        topk=topk,
    )

    def ready(values: Tensor, _: float) -> Tensor:
        return values.detach().to(dtype if values.is_floating_point() else values.dtype).contiguous()

    return each_token(tokens, ready)


def require_tokens(objective: Objective, tokens: RolloutTokens, num_tokens: int, vocab_size: int) -> None:
    """Refuse tokens that do not fit the logits or the objective; this reads no value of a tensor.

    Args:
        objective: Objective that reads the tokens.
        tokens: Tokens as packed, or as given by the caller, with only the optional inputs that it reads.
        num_tokens: T, of the logits or hidden states.
        vocab_size: Vocabulary size of the model, without padding.
    """
    problems = [*_missing(objective, tokens), *_misshapen(tokens, num_tokens)]
    if not problems and tokens.topk is not None:
        problems = _too_few_or_many(objective, tokens.topk.ids.shape[1], vocab_size)
    if problems:
        raise ConfigError(problems)


def _missing(objective: Objective, tokens: RolloutTokens) -> list[Problem]:
    needed: dict[str, str] = {}
    if objective.needs_topk and tokens.topk is None:
        needed["topk_ids"] = f"because the divergence is {objective.divergence}"
    if objective.anchor == "recomputed" and tokens.old_log_probs is None:
        needed["old_log_probs"] = "because anchor = 'recomputed'"
    for name, coefficient in objective.inputs_of_terms.items():
        if getattr(tokens, name) is None:
            needed[name] = f"because {coefficient} is not 0"
    return [
        _problem(f"{name} of {objective.name}", "none", f"a tensor, {why}", f"Pass {name}=...")
        for name, why in needed.items()
    ]


def _misshapen(tokens: RolloutTokens, num_tokens: int) -> list[Problem]:
    integers: tuple[str, ...] = ("targets", "topk_ids", "positions", "lengths")
    kinds = {**dict.fromkeys(integers, "integer numbers"), "loss_mask": "bool or integer numbers"}
    given: dict[str, Tensor | None] = {name: getattr(tokens, name) for name in ROLLOUT_TOKENS if name != "topk"}
    if tokens.topk is not None:
        given |= {"topk_ids": tokens.topk.ids, "topk_rollout_log_probs": tokens.topk.log_probs}
    ids = given.get("topk_ids")
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
            action = f"Convert {name} when you build the batch."
            problems.append(_problem(name, str(values.dtype), kind, action))
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


def check_values(objective: Objective, tokens: RolloutTokens, shard: VocabShard, width: int) -> None:
    """Refuse values that no learning token may have, and shards of `width` columns that leave some out.

    This takes one exchange between the shards, and three device synchronisations if all values are valid.
    """
    require_cover(shard, width, tokens.targets.device)
    _require_known_ids(tokens, shard.vocab_size)
    zeros = torch.zeros_like(tokens.rollout_log_probs)
    at_topk = None if tokens.topk is None else torch.zeros_like(tokens.topk.log_probs)
    one = tokens.targets.new_tensor([zeros.numel()])  # response: their lengths were checked, or come packed
    inputs = PolicyLossInputs.of(tokens, zeros, topk_log_probs=at_topk, entropy=zeros, response_lengths=one)
    learning_tokens(objective, inputs)


def _require_known_ids(tokens: RolloutTokens, vocab_size: int) -> None:
    is_learning = (
        torch.ones_like(tokens.targets, dtype=torch.bool) if tokens.loss_mask is None else tokens.loss_mask
    )
    is_bad = is_learning & ((tokens.targets < 0) | (tokens.targets >= vocab_size))
    found = {"targets": (tokens.targets[:, None], is_bad[:, None])}
    if tokens.topk is not None:
        topk_ids = tokens.topk.ids
        is_outside = (topk_ids < -1) | (topk_ids >= vocab_size)
        found["topk_ids"] = (topk_ids, is_outside & is_learning[:, None])
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


@torch.no_grad()
def combine_statistics(
    statistics: Float[Tensor, "shards T 4+K"],
    tokens: RolloutTokens,
    objective: Objective,
    responses: PackedResponses | None = None,
) -> tuple[Float[Tensor, "ROWS T"], Float[Tensor, "T K"]]:
    """Return the rows and the Top-K log-probs from the statistics; see `reference.combine`.

    Objectives that the compiled kernels do not support are computed in PyTorch, on any device.

    Args:
        statistics: Statistics of all shards of the vocabulary.
        tokens: T tokens, in the kernels' types.
        objective: Objective to optimise.
        responses: Responses, needed by rules over complete responses, which read all their tokens.
    """
    if is_compiled(objective):
        topk = (None, None) if tokens.topk is None else (tokens.topk.ids, tokens.topk.log_probs)
        return combine(statistics, [getattr(tokens, name) for name in _COMBINED] + [*topk], encode(objective))
    has_known_values = ops.is_compiled_for(statistics.device.type)
    if responses is None or not objective.needs_responses:
        return reference.combine(statistics, objective, tokens, has_known_values=has_known_values)
    rows, topk_log_probs = reference.combine(
        responses.whole(statistics.transpose(0, 1)).transpose(0, 1),
        objective,
        responses.whole_record(tokens),
        response_lengths=responses.lengths,
        has_known_values=has_known_values,
    )
    return responses.own(rows, dim=1), responses.own(topk_log_probs)


# Fields of `RolloutTokens` that the operator takes, before the ids and log-probs of the Top-K.
_COMBINED = ("targets", "rollout_log_probs", "advantages", "loss_mask", "token_weights", "old_log_probs")


@custom_op(
    "megatron_dppo::combine",
    mutates_args=(),
    schema="(Tensor statistics, Tensor?[] tokens, float[] objective) -> (Tensor, Tensor)",
)
def combine(statistics: Tensor, tokens: list[Tensor | None], objective: list[float]) -> tuple[Tensor, Tensor]:
    """([len(ROWS), T], [T, K] log-probs) from the statistics [shards, T, 4+K] of all shards; no gradient.

    The operator takes the fields of a `RolloutTokens` as a list, because a schema has no records.
    """
    *values, ids, log_probs = tokens
    topk = None if ids is None or log_probs is None else RolloutTopK(ids, log_probs)
    known: dict[str, Any] = dict(zip(_COMBINED, values, strict=True))
    return ops.kernels_of(statistics).combine(statistics, decode(objective), RolloutTokens(**known, topk=topk))


@combine.register_fake
def _(statistics: Tensor, tokens: list[Tensor | None], *_: Any) -> tuple[Tensor, ...]:
    num_rows, ids = statistics.shape[1], tokens[-2]
    num_topk = 0 if ids is None else ids.shape[1]
    return statistics.new_empty((len(ROWS), num_rows)), statistics.new_empty((num_rows, num_topk))
