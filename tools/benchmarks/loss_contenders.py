"""Losses that loss.py times: our losses, and the matrix products that they need. Runs and checks them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_dppo.algorithms import preset
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss, linear_log_probs
from tools.benchmarks.loss_cases import TOP_K, Case

Form = Literal["logits", "linear", "log_probs"]
Value = Literal["loss", "surrogate", "plain_loss", "log_probs", "nothing"]
Tensors = tuple[Tensor, ...]
# Largest relative errors that rounding to bfloat16 explains.
LOSS_LIMIT, GRADIENT_LIMIT = 1e-2, 3e-2


class UnavailableError(Exception):
    """A contender cannot run here. The message is the reason."""


@dataclass(frozen=True)
class Contender:
    """An implementation of the loss, or of a part of it."""

    name: str
    form: Form
    load: Callable[[], Callable[..., Any]]  # imports the library, and returns the function that takes `inputs`
    inputs: Callable[[Case], Tensors]  # makes new inputs, not timed
    value: Value = "loss"  # the value that the function returns
    is_ours: bool = False
    is_differentiated: bool = True  # False: the function returns its gradients, or has none
    needs_gpu: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Outcome:
    """Value and gradients of one run."""

    value: Tensor | None
    gradients: Tensors


def run(contender: Contender, function: Callable[..., Any], case: Case, inputs: Tensors) -> Outcome:
    """Run forward and, if the contender has one, backward."""
    if contender.form == "log_probs":
        with torch.no_grad():
            found = function(case, *inputs)
        return Outcome(None if contender.value == "nothing" else found, ())
    if not contender.is_differentiated:
        return Outcome(None, function(case, *inputs))
    loss = function(case, *inputs)
    return Outcome(loss.detach(), torch.autograd.grad(loss, inputs))


def check(contender: Contender, case: Case, outcome: Outcome) -> tuple[float | None, float | None, str]:
    """Return the relative errors of loss and gradients (`None` without a value), and the faults as text."""
    is_plain = contender.value == "plain_loss"
    loss_error = gradient_error = None
    if outcome.value is not None:
        weights = case.weights(is_plain=is_plain)
        parts = {
            "loss": -weights * case.log_probs,
            "plain_loss": -weights * case.log_probs,
            "surrogate": -weights,
            "log_probs": case.log_probs,
        }[contender.value]
        if contender.value == "log_probs":
            loss_error = float((outcome.value - parts).norm() / parts.norm())
        else:
            loss_error = float((outcome.value - parts.sum()).abs() / parts.abs().sum())
    if outcome.gradients and contender.is_differentiated:
        gradient_error = case.gradient_error(outcome.gradients, is_plain=is_plain)
    faults = [
        f"{name} off by {error:.1e}, at most {limit:.0e} is rounding"
        for name, error, limit in (
            ("value", loss_error, LOSS_LIMIT),
            ("gradient", gradient_error, GRADIENT_LIMIT),
        )
        if error is not None and not error <= limit
    ]
    return loss_error, gradient_error, "; ".join(faults)


def logits_leaf(case: Case) -> Tensors:
    """Return logits [N, V] that require a gradient."""
    return (case.restored()[:-1].detach().requires_grad_(),)


def linear_leaves(case: Case) -> Tensors:
    """Return hidden states [N, H] and weight [V, H] that require gradients."""
    return case.hidden.detach().requires_grad_(), case.weight.detach().requires_grad_()


def linear_inputs(case: Case) -> Tensors:
    """Return hidden states [N, H] and weight [V, H] without gradients."""
    return case.hidden, case.weight


def _tokens(case: Case, name: str) -> dict[str, Any]:
    topk: dict[str, Any] = {}
    objective = preset(name)
    if objective.needs_topk:
        objective = preset(name, top_k=TOP_K)
        topk = dict(topk_ids=case.topk_ids, topk_rollout_log_probs=case.topk_rollout_log_probs)
    return topk | dict(
        targets=case.targets,
        rollout_log_probs=case.rollout_log_probs,
        advantages=case.advantages,
        objective=objective,
    )


def _ours_from_logits(name: str) -> Callable[[Case, Tensor], Tensor]:
    def loss(case: Case, logits: Tensor) -> Tensor:
        return fused_policy_loss(logits, **_tokens(case, name), inplace_backward=True).loss_sum

    return loss


def _ours_linear(name: str) -> Callable[[Case, Tensor, Tensor], Tensor]:
    def loss(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
        return fused_linear_policy_loss(hidden, weight, **_tokens(case, name)).loss_sum

    return loss


def _our_log_probs(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_log_probs(hidden, weight, case.targets).log_probs


def _three_products(case: Case, hidden: Tensor, weight: Tensor) -> Tensors:
    """Compute one product of all rows and two of the live rows. `working` is both logits and their gradient."""
    logits = torch.mm(hidden, weight.t(), out=case.working[:-1])
    gradient = logits[: case.num_live]
    return gradient @ weight, gradient.t() @ hidden[: case.num_live]


def _one_product(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(hidden, weight.t(), out=case.working[:-1])


def _log_softmax_loss(
    logits: Tensor, targets: Tensor, topk_ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    log_probs = logits.float().log_softmax(-1)
    topk = log_probs.detach().gather(1, topk_ids.long())
    return -(weights * log_probs.gather(1, targets[:, None])[:, 0]).sum(), topk


def _load_log_softmax() -> Callable[[Case, Tensor], Tensor]:
    compiled = torch.compile(_log_softmax_loss, dynamic=False)

    def loss(case: Case, logits: Tensor) -> Tensor:
        return compiled(logits, case.targets, case.topk_ids, case.coefficients)[0]

    return loss


def ours_and_floors() -> list[Contender]:
    """Return our losses in three forms, a plain PyTorch loss, and the matrix products of the linear forms."""
    contenders = [
        Contender(
            f"ours, {name}", "logits", lambda name=name: _ours_from_logits(name), logits_leaf, is_ours=True
        )
        for name in ("dppo_topk_kl", "dppo_binary_tv")
    ]
    contenders += [
        Contender(
            "log_softmax + gather",
            "logits",
            _load_log_softmax,
            logits_leaf,
            remark="float32; torch.compile on a GPU",
        ),
        Contender(
            "ours, dppo_topk_kl", "linear", lambda: _ours_linear("dppo_topk_kl"), linear_leaves, is_ours=True
        ),
        Contender(
            "three matrix products",
            "linear",
            lambda: _three_products,
            linear_inputs,
            "nothing",
            is_differentiated=False,
            remark="the floor: two of the three without dead rows",
        ),
        Contender("ours", "log_probs", lambda: _our_log_probs, linear_inputs, "log_probs", is_ours=True),
        Contender(
            "one matrix product",
            "log_probs",
            lambda: _one_product,
            linear_inputs,
            "nothing",
            remark="the floor",
        ),
    ]
    return contenders
