"""Losses on routers in addition to the policy's loss, and moves of expert biases: the same in every layout.

Megatron averages these losses over a micro-batch, padding and prompts included, and then divides its gradients
by the number of learning tokens. Their weight thus depends on packing, prompts and layout. Here they are
over the learning tokens of the complete mini-batch (docs/reference/training.md defines them), and Megatron's
own are off.
"""

# Megatron has no stubs. PyTorch does not annotate all_reduce and tolist.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_dppo.actor.forward import Part
from megatron_dppo.architectures.megatron_options import RouterCoefficients
from megatron_dppo.data.batches.prefixes import RepeatedRows
from megatron_dppo.mcore.groups import sequence_parallel_rows
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.routing_replay.replay import is_in_backward, routers
from megatron_dppo.types import TrainBatch


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a micro-batch that this rank's routers see, and the sequences in which they learn."""

    num_learning: Int64[Tensor, " T"]  # number of those sequences
    is_learning: Bool[Tensor, " rows"]  # of each row of the loss
    sequence: Int64[Tensor, " rows"]  # index of each row's sequence
    num_sequences: int  # S
    rows: RepeatedRows | None  # token of each row, on all tensor-parallel ranks; None: row t is token t
    own: slice  # this rank's tokens among them

    @classmethod
    def of(cls, part: Part) -> "_Tokens":
        """Return them for the tokens of this context-parallel rank, whose `cu_seqlens` are of all ranks'."""
        view, tokens, scored = part
        is_learning = scored.loss_mask
        lengths = scored.cu_seqlens.diff().long()
        num_parts = cast(int, parallel_state.get_context_parallel_world_size())
        sequence = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(
            lengths // num_parts, output_size=is_learning.numel()
        )
        own = sequence_parallel_rows(tokens.tokens.numel())
        if view.rows is None:
            is_learning, sequence = is_learning[own], sequence[own]
        num_learning = view.num_learning(scored)[own]
        return cls(num_learning, is_learning, sequence, lengths.numel(), view.rows, own)

    def counts(self, chosen: Float[Tensor, "T experts"]) -> Float[Tensor, "S experts"]:
        """Sum over the tokens that learn in each sequence."""
        if self.rows is None:
            of_rows = chosen * self.is_learning[:, None]
        else:
            place = self.rows.rows - self.own.start
            is_counted = self.is_learning & (place >= 0) & (place < chosen.shape[0])
            of_rows = chosen[place.clamp(0, chosen.shape[0] - 1)] * is_counted[:, None]
        return chosen.new_zeros((self.num_sequences, chosen.shape[1])).index_add_(0, self.sequence, of_rows)

    def weights(self, of_sequence: Float[Tensor, "S experts"]) -> Float[Tensor, "T experts"]:
        """Sum over the sequences in which each token learns."""
        of_rows = torch.where(self.is_learning[:, None], of_sequence[self.sequence], 0.0)
        return of_rows if self.rows is None else self.rows.summed(of_rows)[self.own]


class _RouterTap:
    """Stands before one router's `routing`: attaches the losses to its logits and counts tokens per expert."""

    def __init__(self, router: Any, coefficients: RouterCoefficients, sequence_weight: float) -> None:
        """Take the loss of a sequence `sequence_weight` times: what gradients are going to be divided by."""
        self.router, self._coefficients = router, coefficients
        self._sequence_weight = sequence_weight
        self._route = router.routing
        self.tokens: _Tokens | None = None  # of the next forward pass
        self._forwarded: deque[_Tokens] = deque()  # of passes that are going to be recomputed
        device = router.weight.device
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)  # z and balance, as they are attached
        self.num_tokens = torch.zeros(router.num_experts, device=device)  # of each expert

    def routing(self, logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the probabilities and the map of `TopKRouter.routing`, for logits [T, 1, experts]."""
        assert self.tokens is not None, "follow() comes before forward"
        tokens = self._forwarded.popleft() if is_in_backward() else self.tokens
        if not torch.is_grad_enabled():  # activations are recomputed in the backward pass, with gradients
            self._forwarded.append(tokens)
            return self._route(logits, *arguments, **options)
        if self._coefficients.z:
            logits = self._attach(logits, 0, self._coefficients.z * self._z_loss(logits, tokens))
        probs, routing_map = self._route(logits, *arguments, **options)
        if self._coefficients.balance:
            weight = self._coefficients.balance * self._sequence_weight
            probs = self._attach(probs, 1, weight * self._balance_loss(logits, tokens))
        if _moves_bias(self.router):
            self.num_tokens += (routing_map * tokens.num_learning[:, None]).sum(0)
        return probs, routing_map

    def _attach(self, output: Tensor, column: int, loss: Tensor) -> Tensor:
        """Return the output with a loss whose gradient is added in its backward pass."""
        self.totals[column] += loss.detach()
        return cast(Tensor, MoEAuxLossAutoScaler.apply(output, loss))

    def _z_loss(self, logits: Tensor, tokens: _Tokens) -> Tensor:
        """Return the sum of the squared log-sum-exp of the logits, over this rank's learning tokens."""
        squares = logits.flatten(0, -2).float().logsumexp(-1).square()
        return torch.where(tokens.num_learning > 0, squares * tokens.num_learning, 0.0).sum()

    def _balance_loss(self, logits: Tensor, tokens: _Tokens) -> Tensor:
        """Return this rank's part of the sum over sequences of E sum_i f_i P_i, over learning tokens."""
        router = self.router
        flat = logits.flatten(0, -2).float()
        scores = flat.sigmoid() if router.score_function == "sigmoid" else flat.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        with torch.no_grad():
            chosen = torch.zeros_like(scores).scatter_(1, scores.topk(router.topk, dim=1).indices, 1.0)
            counts = tokens.counts(chosen)
            if router.tp_cp_group.size() > 1:
                dist.all_reduce(counts, group=router.tp_cp_group)
            num_choices = counts.sum(1, keepdim=True).clamp(min=1)  # k T
            of_sequence = counts * (scores.shape[1] * router.topk) / num_choices.square()  # E f_i / T
            weights = tokens.weights(of_sequence)
        return torch.where(tokens.num_learning[:, None] > 0, scores * weights, 0.0).sum()


class RouterLosses:
    """The losses and the moves of expert biases that `[megatron]` asks of a model's routers."""

    def __init__(self, chunks: Sequence[torch.nn.Module], coefficients: RouterCoefficients) -> None:
        """Note the routers of this rank's part of the model, one chunk for each virtual pipeline stage."""
        self._routers: list[list[Any]] = [list(routers(chunk).values()) for chunk in chunks]
        self._coefficients = coefficients
        own = [router for chunk in self._routers for router in chunk]
        self._is_used = bool(coefficients.z or coefficients.balance) or any(map(_moves_bias, own))
        self._taps: list[list[_RouterTap]] = []  # while the losses are added
        self._done: list[_RouterTap] = []  # of the last block

    @contextmanager
    def added(self, batch: TrainBatch) -> Generator[None]:
        """Add the losses to the backward passes inside the block; `follow` comes before each forward pass."""
        if not self._is_used:
            yield
            return
        weight = batch.num_loss_tokens / max(batch.num_samples, 1)
        self._taps = [
            [_RouterTap(router, self._coefficients, weight) for router in chunk] for chunk in self._routers
        ]
        self._done = [tap for chunk in self._taps for tap in chunk]
        for tap in self._done:
            tap.router.routing = tap.routing
        try:
            yield
        finally:
            for tap in self._done:
                del tap.router.routing
            self._taps = []

    def follow(self, part: Part, chunk: int) -> None:
        """Set the tokens of a chunk's next forward pass."""
        if self._taps:
            tokens = _Tokens.of(part)
            for tap in self._taps[chunk]:
                tap.tokens = tokens

    def add_metrics(self, metrics: Metrics, num_loss_tokens: int) -> None:
        """Add the losses of the last block, over all routers of this rank, to the metrics.

        Args:
            metrics: Gets `loss/router_z` and `loss/router_balance`, each if its coefficient is not 0.
            num_loss_tokens: Learning tokens of the mini-batch, on one rank; 0 on all others.
        """
        taps = self._done
        totals = torch.stack([tap.totals for tap in taps]).sum(0) if taps else torch.zeros(2)
        z, balance = cast(list[float], totals.tolist())
        if self._coefficients.z:
            metrics.add_mean("loss/router_z", z, num_loss_tokens)
        if self._coefficients.balance:
            metrics.add_mean("loss/router_balance", balance, num_loss_tokens)

    @torch.no_grad()
    def move_biases(self) -> None:
        """Move each expert's bias by `moe_router_bias_update_rate` towards the mean load of the last block."""
        moved = [tap for tap in self._done if _moves_bias(tap.router)]
        if not moved:
            return
        loads = torch.stack([tap.num_tokens for tap in moved])
        dist.all_reduce(loads, group=moved[0].router.tp_dp_cp_group)
        for tap, load in zip(moved, loads, strict=True):
            rate = tap.router.config.moe_router_bias_update_rate
            tap.router.expert_bias.add_((load.mean() - load).sign(), alpha=rate)


def _moves_bias(router: Any) -> bool:
    return bool(router.enable_expert_bias and router.config.moe_router_bias_update_rate)
