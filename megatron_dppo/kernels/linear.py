"""The policy loss from hidden states: logits exist a chunk of tokens at a time, and are never kept.

The gradients are computed in the forward pass, chunk by chunk. That takes three matrix products; recomputing
the logits in the backward pass would take four. Tokens that do not learn are left out of all three products,
and masked tokens out of the two products of the gradient. A chunk is a part of the tokens, not of the
vocabulary: a chunk of columns would have to be computed twice, because the gradient needs the softmax over all
columns. Each chunk synchronises with the device once, because the number of tokens with a gradient decides
the shape of the products. A rule over complete responses needs all log-probs before any gradient. The logits
are then computed twice, which takes four products.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_dppo.algorithms import Objective
from megatron_dppo.kernels import ops
from megatron_dppo.kernels.combine import check_values, checked_tokens, combine_statistics
from megatron_dppo.kernels.log_probs import all_statistics
from megatron_dppo.kernels.loss import FusedPolicyLoss, describe
from megatron_dppo.kernels.ops import accumulate_product_
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.reference import ROWS
from megatron_dppo.kernels.shards import PackedResponses
from megatron_dppo.types import RolloutTokens


def packed_linear_policy_loss(
    hidden: Float[Tensor, "rows H"],
    weight: Float[Tensor, "V H"],
    tokens: RolloutTokens,
    objective: Objective,
    layer: OutputLayer,
    responses: PackedResponses | None = None,
    *,
    loss_scale: Float[Tensor, ""] | None = None,
    debug: bool = False,
) -> FusedPolicyLoss:
    """`fused_linear_policy_loss` of a record of tokens, such as a micro-batch; it takes and raises the same.

    Args:
        hidden: Hidden states, as for `fused_linear_policy_loss`.
        weight: Output layer's weight, as for `fused_linear_policy_loss`.
        tokens: All of the T tokens.
        objective: Objective to optimise.
        layer: How the weight is split, and how logits are made with it.
        responses: Responses of the tokens. If they are split over context-parallel ranks, all of these ranks
            call this together.
        loss_scale: One number, the gradient of `loss_sum` in the backward pass. If it is given, and the weight
            has a float32 `main_grad`, each chunk adds to `main_grad` directly, without a buffer of the weight's
            size. So this forward pass has a side effect: exactly one backward pass must follow, and it fails
            with another gradient of `loss_sum`.
        debug: Also check values, at the price of device synchronisations.
    """
    layer.require(hidden, weight)
    ready = checked_tokens(objective, tokens, hidden, layer.num_tokens(hidden), layer.shard.vocab_size)
    if debug:
        check_values(objective, ready, layer.shard, weight.shape[0])
    is_training = torch.is_grad_enabled()
    found = None
    if objective.needs_responses:
        statistics = all_statistics(hidden, weight, layer, ready.targets, ready.loss_mask, ready.topk_ids)
        found = combine_statistics(statistics, ready, objective, responses)
    results = _LinearPolicyLoss.apply(hidden, weight, layer, ready, objective, found, loss_scale, is_training)
    return describe(*results, has_topk=tokens.topk is not None)


class _LinearPolicyLoss(torch.autograd.Function):
    """(loss, [len(ROWS), T], [T, K] log-probs) of hidden states and weight; gradients are made with them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        tokens: RolloutTokens,
        objective: Objective,
        found: tuple[Tensor, Tensor] | None,
        loss_scale: Tensor | None,
        is_training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        whole = layer.gathered(hidden)
        needs_hidden, needs_weight = (needed and is_training for needed in ctx.needs_input_grad[:2])
        by_hidden = torch.zeros_like(whole) if needs_hidden else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        # A float32 buffer of the weight's size is saved if chunks add to Megatron's sum of gradients.
        total = getattr(weight, "main_grad", None) if loss_scale is not None else None
        is_direct = needs_weight and total is not None and total.dtype == wide
        scale = loss_scale.to(wide).reshape(()) if is_direct and loss_scale is not None else None
        by_weight = None
        if needs_weight:
            by_weight = total if is_direct else torch.zeros_like(weight, dtype=wide)
        rows, topk = found or _neutral_results(tokens)
        is_done = found is not None and by_hidden is None and by_weight is None
        for which in () if is_done else layer.chunks(weight, whole.shape[0], tokens.loss_mask):
            own = replace(tokens, loss_mask=None).rows(which)  # all of them learn
            inputs = whole[which]
            logits = layer.logits(inputs, weight)
            if found is None:
                statistics = layer.statistics(logits, own.targets, own.topk_ids)
                own_rows, topk[which] = combine_statistics(statistics, own, objective)
                rows[:, which] = own_rows
            else:
                own_rows = rows[:, which].contiguous()
            if by_hidden is not None or by_weight is not None:
                live = _write_gradient(logits, own_rows, own.targets, scale, objective, layer)
                gradient = logits[: live.numel()].to(weight.dtype)
                if by_hidden is not None:
                    by_hidden[_positions(which, live)] = gradient @ weight
                if by_weight is not None:
                    accumulate_product_(by_weight, gradient.t(), inputs[live])
                del gradient
            del logits, inputs  # before the next chunk's are made
        ctx.mark_non_differentiable(rows, topk)
        # autograd frees saved tensors after the backward pass
        ctx.save_for_backward(by_hidden, None if is_direct else by_weight, scale)
        ctx.layer, ctx.weight, ctx.is_direct = layer, weight, is_direct
        return rows[ROWS.index("loss")].sum(), rows, topk

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight, scale = ctx.saved_tensors
        if scale is not None:  # the gradients are already scaled
            message = "the gradient of loss_sum is not the loss_scale that its forward pass was given"
            torch.ops.aten._assert_async.msg(upstream[0] == scale, message)
        elif by_hidden is not None:
            by_hidden = by_hidden * upstream[0].to(by_hidden.dtype)
        if by_hidden is not None:
            by_hidden = ctx.layer.reduced(by_hidden)
        if ctx.is_direct:
            by_weight = _added(ctx.weight)
        elif by_weight is not None:
            by_weight = _add_to_main_grad(ctx.weight, by_weight, upstream[0])
        return by_hidden, by_weight, None, None, None, None, None, None


def _neutral_results(tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """Return the rows and Top-K log-probs of tokens that do not learn."""
    num_tokens, ids = tokens.targets.numel(), tokens.topk_ids
    rows = tokens.advantages.new_zeros((len(ROWS), num_tokens))
    rows[ROWS.index("ratio")] = 1.0
    return rows, tokens.advantages.new_full((num_tokens, 0 if ids is None else ids.shape[1]), -math.inf)


def _write_gradient(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    upstream: Tensor | None,
    objective: Objective,
    layer: OutputLayer,
) -> Tensor:
    """Write the gradient of the live rows over the first logits; returns which rows these are, in their order.

    A dead row among the first is filled from a live row after them, and no other row moves. So each row is
    written by the block that read it, or by a block with a row that no other block writes.
    """
    is_live = (rows[ROWS.index("log_prob_gradient")] != 0) | (rows[ROWS.index("entropy_gradient")] != 0)
    live = is_live.nonzero()[:, 0]
    num_live = live.numel()
    sources = torch.arange(num_live, device=live.device).masked_scatter(~is_live[:num_live], live.flip(0))
    moved = None if num_live == logits.shape[0] else sources
    settings = layer.settings(with_entropy=objective.entropy_coef != 0)
    ops.logits_gradient_(logits, rows, targets, upstream, moved, *settings)
    return sources


def _positions(which: slice | Tensor, rows: Tensor) -> Tensor:
    return rows + which.start if isinstance(which, slice) else which[rows]


def _add_to_main_grad(weight: Any, gradient: Tensor, upstream: Tensor) -> Tensor:
    """Return the weight's gradient for autograd: the buffer times a factor."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return (gradient * upstream).to(weight.dtype)
    main_grad.addcmul_(gradient.to(main_grad.dtype), upstream.to(main_grad.dtype))
    return _added(weight)


def _added(weight: Any) -> Tensor:
    """Return what autograd gets for a gradient that is in `main_grad`, as Megatron's own linear layers do.

    Megatron's hook expects a tensor. It adds the tensor if the weight is also the embedding's, else ignores it.
    """
    weight.grad_added_to_main_grad = True
    is_read = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if is_read else torch.empty_like(weight)
