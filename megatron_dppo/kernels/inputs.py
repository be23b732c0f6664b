"""Inputs of a fused loss: their split over ranks, and their checks.

Tensor parallelism splits the vocabulary, so that ranks exchange statistics. Context parallelism splits the
tokens of responses, so that rules over complete responses join them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64, Integer, Shaped
from torch import Tensor

from megatron_dppo.algorithms import Objective, PolicyLossInputs
from megatron_dppo.algorithms.loss import learning_tokens
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.kernels.encoding import MAX_TOP_K
from megatron_dppo.types import ROLLOUT_TOKENS, RolloutTokens, RolloutTopK, each_token

LOGIT_TYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that a rank's logits hold."""

    start: int  # global id of the first column; shards follow each other in rank order
    vocab_size: int  # of the model, without the columns that pad the last shards
    group: dist.ProcessGroup | None = None  # the ranks that hold the other columns; None without a split


def num_columns(width: int, vocab_start: int, vocab_size: int) -> int:
    """Return how many of `width` columns from `vocab_start` on are tokens of the vocabulary."""
    return max(0, min(width, vocab_size - vocab_start))


def gather_statistics(
    own: Shaped[Tensor, "T ..."], group: dist.ProcessGroup | None
) -> Shaped[Tensor, "ranks T ..."]:
    """Return the rows of all ranks, in rank order: the same bits on every rank."""
    if group is None or group.size() == 1:
        return own[None]
    gathered = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(group.size(), *own.shape)


def require_shard(
    logits: Float[Tensor, "T V"], vocab_start: int, vocab_size: int | None, group: dist.ProcessGroup | None
) -> VocabShard:
    """Return this rank's shard of the vocabulary.

    Raises:
        ConfigError: The logits are not a matrix of a supported type, the first rank's shard does not start at
            column 0, or the last rank's shard does not reach the end of the vocabulary.
    """
    size = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    if logits.dim() != 2 or logits.dtype not in LOGIT_TYPES:
        found = f"shape {list(logits.shape)}, {logits.dtype}"
        expected = "[T, V/tp] in bfloat16, float32 or float64"
        raise ConfigError(
            Problem("fused_policy_loss.logits", found, expected, "Flatten batch and sequence into T.")
        )
    whole = logits.shape[1] * size if vocab_size is None else vocab_size
    end = vocab_start + logits.shape[1]
    if vocab_start < 0 or (rank == 0 and vocab_start != 0) or (rank == size - 1 and end < whole):
        raise ConfigError(
            Problem(
                "fused_policy_loss.vocab_start",
                f"columns {vocab_start} to {end} on rank {rank} of {size}",
                f"shards in rank order that cover the {whole} tokens of the vocabulary",
                "Pass the global id of the shard's first column, vocab_size without padding, and the group "
                "whose ranks hold the other columns.",
            )
        )
    return VocabShard(vocab_start, whole, group)


def require_temperature(temperature: float) -> None:
    """Raise unless the temperature is a valid divisor of logits.

    Raises:
        ConfigError: It is not a finite number above 0.
    """
    if not 0 < temperature < float("inf"):
        action = "Pass the temperature that the rollout sampled with."
        raise ConfigError(
            Problem("fused_policy_loss.temperature", repr(temperature), "a finite number > 0", action)
        )


def require_cover(shard: VocabShard, width: int, device: torch.device) -> None:
    """Refuse shards that leave tokens out or hold some twice; one exchange, and a device synchronisation.

    Raises:
        ConfigError: On every rank of the group, naming the first shard that does not follow the one before.
    """
    if shard.group is None:
        return
    own = torch.tensor([[shard.start, shard.start + width]], device=device)
    end = 0
    for rank, (start, stop) in enumerate(gather_statistics(own, shard.group).view(-1, 2).tolist()):
        if start != end:
            found = f"columns {start} to {stop} on rank {rank} of the group, after column {end}"
            expected = f"shards that cover the {shard.vocab_size} tokens without gaps or overlaps"
            action = "Pass the global id of each shard's first column."
            raise ConfigError(Problem("fused_policy_loss.vocab_start", found, expected, action))
        end = stop


Record = TypeVar("Record")


@dataclass(frozen=True, eq=False)
class PackedResponses:
    """Positions of a micro-batch's responses, and of this rank's rows in it."""

    lengths: Int64[Tensor, " B"]  # packed tokens of each response, on all ranks of `group` together
    group: dist.ProcessGroup | None = None  # context-parallel ranks, each with the same number of tokens
    order: Int64[Tensor, " whole"] | None = None  # position of each of the ranks' concatenated rows

    @property
    def is_split(self) -> bool:
        """Whether other ranks have some of the tokens."""
        return self.group is not None and self.group.size() > 1

    @cached_property
    def _sources(self) -> Tensor:
        assert self.order is not None, "split responses have the position of each row"
        return torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(self.order.numel(), device=self.order.device)
        )

    def whole(self, values: Shaped[Tensor, "T ..."]) -> Shaped[Tensor, "whole ..."]:
        """Return the rows of all ranks in their order, the same bits on each.

        All ranks of the group call it together.
        """
        if not self.is_split:
            return values
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        gathered = gather_statistics(sent.contiguous(), self.group).flatten(0, 1)
        return gathered[self._sources].to(values.dtype)

    def whole_record(self, record: Record) -> Record:
        """Return a record of per-token tensors with the rows of all ranks."""
        return each_token(record, lambda values, _: self.whole(values)) if self.is_split else record

    def own(self, values: Any, dim: int = 0) -> Any:
        """Return this rank's rows, in its order, of a tensor that has the rows of all ranks along `dim`."""
        if not self.is_split or values is None:
            return values
        assert self.group is not None and self.order is not None
        num_rows = self.order.numel() // self.group.size()
        first = self.group.rank() * num_rows
        return values.index_select(dim, self.order[first : first + num_rows])


def given_topk(
    objective: Objective,
    ids: Integer[Tensor, "T K"] | None,
    rollout_log_probs: Float[Tensor, "T K"] | None,
) -> RolloutTopK | None:
    """Return the Top-K of the public losses' arguments; log-probs of one that is only reported may be absent.

    Raises:
        ConfigError: The objective needs a Top-K, and ids or log-probs are absent.
    """
    if objective.needs_topk:
        given = {"topk_ids": ids, "topk_rollout_log_probs": rollout_log_probs}
        why = f"a tensor, because the divergence is {objective.divergence}"
        absent = [name for name, values in given.items() if values is None]
        if absent:
            raise ConfigError([_problem(name, "none", why, f"Pass {name}=...") for name in absent])
    if ids is None:
        return None
    if rollout_log_probs is None:
        rollout_log_probs = torch.zeros_like(ids, dtype=torch.float32)
    return RolloutTopK(ids, rollout_log_probs)


def require_tokens(objective: Objective, tokens: RolloutTokens, num_tokens: int, vocab_size: int) -> None:
    """Refuse tokens that do not fit the logits or the objective; this reads no value of a tensor.

    Args:
        objective: Objective that reads the tokens.
        tokens: Tokens as packed, or as given by the caller, with only the optional inputs that it reads.
        num_tokens: T, of the logits or hidden states.
        vocab_size: Vocabulary size of the model, without padding.

    Raises:
        ConfigError: An input is missing, or of another shape or type; all faults at once.
    """
    problems = [*_missing(objective, tokens), *_misshapen(tokens, num_tokens)]
    if not problems and tokens.topk is not None:
        problems = _too_few_or_many(objective, tokens.topk.ids.shape[1], vocab_size)
    if problems:
        raise ConfigError(problems)


def check_values(objective: Objective, tokens: RolloutTokens, shard: VocabShard, width: int) -> None:
    """Refuse values that no learning token may have, and shards of `width` columns that leave some out.

    This takes one exchange between the shards, and three device synchronisations if all values are valid.

    Raises:
        ConfigError: Naming the tensor, the row and the value.
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
