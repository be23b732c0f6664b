"""Inputs of loss.py: shapes, their tensors, and exact gradients for comparison."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

TOP_K = 20
REFERENCE_ROWS = 512  # rows that the float32 reference computes at a time
# Tensor-parallel size, and columns of a padded shard of Qwen3's vocabulary.
SHARDS = {"tp1": (1, 151936), "tp2": (2, 76032), "tp4": (4, 38016), "tp8": (8, 19072)}
SMALL_VOCABULARY, SMALL_HIDDEN, HIDDEN = 2048, 128, 2048


@dataclass(frozen=True)
class Shape:
    """One rank's part of the output layer."""

    name: str
    tp: int  # number of ranks that share the vocabulary; one of them is emulated
    num_tokens: int
    num_columns: int
    hidden_size: int

    @classmethod
    def of(cls, name: str, num_tokens: int, *, is_small: bool) -> "Shape":
        """Return a shape by name. A small shape splits a small vocabulary in the same way."""
        tp, columns = SHARDS[name]
        if is_small:
            return cls(name, tp, num_tokens, SMALL_VOCABULARY // tp, SMALL_HIDDEN)
        return cls(name, tp, num_tokens, columns, HIDDEN)


@dataclass(frozen=True, eq=False)
class Case:
    """Tensors of one shape, the same for all contenders. The loss is sum(coefficient * -log_probs).

    Rollout log-probs are so close to the trained log-probs that no trust region masks a token. Dead rows have
    an advantage of 0, and so a coefficient of 0.
    """

    shape: Shape
    dead_share: float
    hidden: Tensor  # [N, H] bfloat16
    weight: Tensor  # [V, H] bfloat16
    pristine: Tensor  # [N + 1, V] bfloat16: logits, and one more row for Liger's GRPO loss
    working: Tensor  # [N + 1, V]: copy for contenders, which may overwrite it
    targets: Tensor  # [N] int64
    log_probs: Tensor  # [N] float32: log-probs of the targets
    rollout_log_probs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    topk_ids: Tensor  # [N, K] int32
    topk_rollout_log_probs: Tensor  # [N, K] float32

    @classmethod
    def make(cls, shape: Shape, dead_share: float, device: torch.device) -> "Case":
        """Make random tensors with a fixed seed."""
        generator = torch.Generator(device).manual_seed(0)
        settings: Any = dict(device=device, generator=generator)
        num, columns = shape.num_tokens, shape.num_columns
        hidden = torch.randn(num, shape.hidden_size, **settings).bfloat16()
        weight = (torch.randn(columns, shape.hidden_size, **settings) * 2 / shape.hidden_size**0.5).bfloat16()
        pristine = torch.zeros(num + 1, columns, dtype=torch.bfloat16, device=device)
        torch.mm(hidden, weight.t(), out=pristine[:num])
        targets = torch.randint(columns, (num,), **settings)
        ids = torch.cat([part.topk(TOP_K).indices for part in pristine[:num].split(REFERENCE_ROWS)])
        log_probs, at_topk = torch.empty(num, device=device), torch.empty(num, TOP_K, device=device)
        for rows in torch.arange(num, device=device).split(REFERENCE_ROWS):
            exact = pristine[rows].float().log_softmax(-1)
            log_probs[rows] = exact.gather(1, targets[rows, None])[:, 0]
            at_topk[rows] = exact.gather(1, ids[rows])
        advantages = torch.randn(num, **settings)
        advantages[torch.randperm(num, **settings)[: round(dead_share * num)]] = 0
        noise = 0.02 * torch.randn(num, **settings)
        mu = (log_probs + noise).clamp(max=0)
        shared = (shape, dead_share, hidden, weight, pristine, torch.empty_like(pristine), targets, log_probs)
        return cls(*shared, mu, advantages, ids.int(), at_topk - 0.01)

    @cached_property
    def coefficients(self) -> Tensor:
        """[N] ratio * advantage: factor of each token's gradient of -log pi."""
        return (self.log_probs - self.rollout_log_probs).exp() * self.advantages

    @property
    def num_live(self) -> int:
        """Number of rows with a gradient."""
        return self.shape.num_tokens - round(self.dead_share * self.shape.num_tokens)

    def restored(self) -> Tensor:
        """Copy the logits into `working` again, and return it."""
        return self.working.copy_(self.pristine)

    def logits_gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the exact gradient of the logits in chunks of rows: [rows, V] float32."""
        for start in range(0, self.shape.num_tokens, REFERENCE_ROWS):
            rows = slice(start, min(start + REFERENCE_ROWS, self.shape.num_tokens))
            gradient = self.pristine[rows].float().softmax(-1)
            gradient.scatter_add_(1, self.targets[rows, None], -gradient.new_ones(gradient.shape[0], 1))
            yield rows, gradient * self.coefficients[rows, None]

    @cached_property
    def linear_gradients(self) -> tuple[Tensor, Tensor]:
        """Float32 gradients of hidden states [N, H] and weight [V, H]."""
        weight = self.weight.float()
        by_hidden, by_weight = torch.empty_like(self.hidden).float(), torch.zeros_like(weight)
        for rows, gradient in self.logits_gradients():
            by_hidden[rows] = gradient @ weight
            by_weight.addmm_(gradient.t(), self.hidden[rows].float())
        return by_hidden, by_weight

    def gradient_error(self, gradients: tuple[Tensor, ...]) -> float:
        """Return the norm of the difference divided by the norm; the larger one for two gradients."""
        if len(gradients) == 2:
            pairs = zip(gradients, self.linear_gradients, strict=True)
            return max(float((found - known).norm() / known.norm()) for found, known in pairs)
        found = gradients[0].detach().reshape(-1, self.shape.num_columns)
        difference, norm = 0.0, 0.0
        for rows, known in self.logits_gradients():
            difference += float((found[rows] - known).square().sum())
            norm += float(known.square().sum())
        return (difference / norm) ** 0.5
