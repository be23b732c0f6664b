"""Losses that loss.py times: our losses, the matrix products that they need, and other libraries' losses.

Each library is imported on demand, or reported as missing. All losses get inputs that make their gradient equal
to ours: each token's cross entropy is multiplied by its coefficient. Liger's GRPO loss is the ratio times the
advantage without clipping, which has the same gradient. The other libraries' losses do not know
the dead rows.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.algorithms import preset
from megatron_dppo.kernels import fused_linear_policy_loss, fused_policy_loss, token_log_probs
from megatron_dppo.kernels.output_layer import OutputLayer
from megatron_dppo.kernels.shards import VocabShard
from tools.benchmarks.loss_cases import TOP_K, Case

Value = Literal["loss", "surrogate", "log_probs", "nothing"]
Tensors = tuple[Tensor, ...]
Function = Callable[..., Any]  # takes a case and the tensors of `Contender.inputs`
# Largest relative errors that rounding to bfloat16 explains.
LOSS_LIMIT, GRADIENT_LIMIT = 1e-2, 3e-2
IGNORED = -100  # target that these libraries ignore
NEVER_CLIPS = 1e6
COMPILED = "float32; torch.compile on a GPU"
TWO_LIVE = "the floor: two of the three without dead rows"


class UnavailableError(Exception):
    """A contender cannot run here. The message is the reason."""


@dataclass(frozen=True)
class Contender:
    """An implementation of the loss, or of a part of it."""

    name: str
    form: Literal["logits", "linear", "log_probs"]
    load: Callable[[], Function]  # imports the library
    value: Value = "loss"  # the value that the function returns
    is_ours: bool = False
    is_differentiated: bool = True  # False: the function returns its gradients, or has none
    needs_gpu: bool = False
    view: Literal["rows", "sequence", "batch"] = "rows"  # logits as [N, V], [N, 1, V] or [1, N + 1, V]
    remark: str = ""

    def inputs(self, case: Case) -> Tensors:
        """Make new inputs, not timed: logits, or hidden states [N, H] and weight [V, H]."""
        if self.form == "logits":
            logits = case.restored()
            views = {"rows": logits[:-1], "sequence": logits[:-1, None], "batch": logits[None]}
            return (views[self.view].detach().requires_grad_(),)
        needs_grad = self.form == "linear" and self.is_differentiated
        return tuple(part.detach().requires_grad_(needs_grad) for part in (case.hidden, case.weight))


def run(contender: Contender, function: Function, case: Case, inputs: Tensors) -> tuple[Tensor | None, Tensors]:
    """Run forward and, if the contender has one, backward. Return the value and the gradients."""
    if contender.form == "log_probs":
        with torch.no_grad():
            found = function(case, *inputs)
        return None if contender.value == "nothing" else found, ()
    if not contender.is_differentiated:
        return None, function(case, *inputs)
    loss = function(case, *inputs)
    return loss.detach(), torch.autograd.grad(loss, inputs)


def check(
    contender: Contender, case: Case, value: Tensor | None, gradients: Tensors
) -> tuple[float | None, float | None, str]:
    """Return the relative errors of value and gradients (`None` without a value), and the faults as text."""
    value_error = gradient_error = None
    if value is not None and contender.value == "log_probs":
        value_error = float((value - case.log_probs).norm() / case.log_probs.norm())
    elif value is not None:
        parts = -case.coefficients * (1 if contender.value == "surrogate" else case.log_probs)
        value_error = float((value - parts.sum()).abs() / parts.abs().sum())
    if gradients and contender.is_differentiated:
        gradient_error = case.gradient_error(gradients)
    named = (("value", value_error, LOSS_LIMIT), ("gradient", gradient_error, GRADIENT_LIMIT))
    faults = [
        f"{name} off by {error:.1e}, at most {limit:.0e} is rounding"
        for name, error, limit in named
        if error is not None and not error <= limit
    ]
    return value_error, gradient_error, "; ".join(faults)


def _tokens(case: Case, name: str) -> dict[str, Any]:
    """Return the arguments of our losses for a preset."""
    objective, topk = preset(name), dict[str, Any]()
    if objective.needs_topk:
        objective = preset(name, top_k=TOP_K)
        topk = dict(topk_ids=case.topk_ids, topk_rollout_log_probs=case.topk_rollout_log_probs)
    mu = dict(rollout_log_probs=case.rollout_log_probs, advantages=case.advantages)
    return topk | mu | dict(targets=case.targets, objective=objective)


def _our_loss(name: str, case: Case, logits: Tensor) -> Tensor:
    return fused_policy_loss(logits, **_tokens(case, name), inplace_backward=True).loss_sum


def _our_linear_loss(name: str, case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
    return fused_linear_policy_loss(hidden, weight, **_tokens(case, name)).loss_sum


def _our_log_probs(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
    layer = OutputLayer(VocabShard(0, weight.shape[0]))
    return token_log_probs(hidden, weight, case.targets, layer).log_probs


def _one_product(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(hidden, weight.t(), out=case.working[:-1])


def _three_products(case: Case, hidden: Tensor, weight: Tensor) -> Tensors:
    """Compute one product of all rows and two of the live rows. `working` is both logits and their gradient."""
    gradient = _one_product(case, hidden, weight)[: case.num_live]
    return gradient @ weight, gradient.t() @ hidden[: case.num_live]


def _log_softmax_loss(logits: Tensor, targets: Tensor, topk_ids: Tensor, weights: Tensor) -> Tensors:
    log_probs = logits.float().log_softmax(-1)
    topk = log_probs.detach().gather(1, topk_ids.long())
    return -(weights * log_probs.gather(1, targets[:, None])[:, 0]).sum(), topk


def _load_log_softmax() -> Function:
    compiled = torch.compile(_log_softmax_loss, dynamic=False)
    return lambda case, logits: compiled(logits, case.targets, case.topk_ids, case.coefficients)[0]


def from_library(distribution: str, module: str, name: str) -> Any:
    """Import an object by name from an installed library.

    Raises:
        UnavailableError: The library is not installed, cannot be imported, or has no such name.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UnavailableError(f"not installed (pip install {distribution})")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise UnavailableError(f"does not import: {error}") from error


def _load_megatron() -> Function:
    name = "fused_vocab_parallel_cross_entropy"
    fused = from_library("megatron-core", "megatron.core.fusions.fused_cross_entropy", name)
    return _weighted(lambda case, logits: fused(logits, case.targets[:, None], dist.group.WORLD)[:, 0])


def _load_liger_grpo() -> Function:
    grpo = from_library("liger-kernel", "liger_kernel.transformers.grpo_loss", "triton_grpo_loss")

    def loss(case: Case, logits: Tensor) -> Tensor:
        # This loss has one advantage per sequence. Token advantages are passed as rollout correction factors.
        one, mu, targets = case.advantages.new_ones(1), case.rollout_log_probs[None], case.targets[None]
        clip = dict(temperature=1.0, beta=0.0, eps_low=NEVER_CLIPS, eps_high=NEVER_CLIPS, inplace=True)
        return grpo(logits, mu, None, targets, one, **clip, vllm_is_ratio=case.advantages[None])[0].sum()

    return loss


def _load_liger_vocab_parallel() -> Function:
    module = "liger_kernel.ops.vocab_parallel_cross_entropy"
    function = from_library("liger-kernel", module, "LigerVocabParallelCEFunction")
    options = (None, IGNORED, 0.0, "pytorch", "global")  # the last three are of label smoothing
    return _weighted(lambda case, logits: function.apply(logits, case.targets[:, None], *options)[:, 0])


def _load_liger_linear() -> Function:
    module = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    function = from_library("liger-kernel", module, "LigerFusedLinearScaledCrossEntropyTPFunction")
    return lambda case, hidden, weight: function.apply(hidden, weight, case.targets, dist.group.WORLD)


def _load_verl() -> Function:
    function = from_library("verl", "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy")
    return lambda case, hidden, weight: -function(hidden, weight, case.targets, 1.0, "none", None)[0]


def _load_cut_cross_entropy() -> Function:
    function = from_library("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy")
    exact = dict(reduction="none", filter_eps=None, impl="cce")  # the filter drops small gradients
    return lambda case, hidden, weight: function(hidden, weight, case.targets, **exact)


def _weighted(entropies: Function) -> Function:
    """Return the loss of a function that returns the tokens' cross entropies [N]."""
    return lambda case, *inputs: (case.coefficients * entropies(case, *inputs)).sum()


def _negated(entropies: Function) -> Function:
    """Return the log-probs [N] of the sampled tokens from a function that returns their cross entropies."""
    return lambda case, *inputs: -entropies(case, *inputs)


LINEAR: dict[str, Callable[[], Function]] = {
    "Liger fused linear CE, TP": _load_liger_linear,
    "verl linear_cross_entropy": _load_verl,
    "cut-cross-entropy, exact": _load_cut_cross_entropy,
}


def contenders() -> list[Contender]:
    """Return our losses in three forms, a plain PyTorch loss, floors, and other libraries' losses."""
    topk, binary = "dppo_topk_kl", "dppo_binary_tv"
    floor: Any = dict(value="nothing", is_differentiated=False)
    ours, on_gpu = partial(Contender, is_ours=True), partial(Contender, needs_gpu=True)
    group: Any = dict(view="sequence", remark="a tensor-parallel group of one")
    found = [
        ours(f"ours, {topk}", "logits", lambda: partial(_our_loss, topk)),
        ours(f"ours, {binary}", "logits", lambda: partial(_our_loss, binary)),
        Contender("log_softmax + gather", "logits", _load_log_softmax, remark=COMPILED),
        ours(f"ours, {topk}", "linear", lambda: partial(_our_linear_loss, topk)),
        Contender("three matrix products", "linear", lambda: _three_products, **floor, remark=TWO_LIVE),
        ours("ours", "log_probs", lambda: _our_log_probs, "log_probs"),
        Contender("one matrix product", "log_probs", lambda: _one_product, **floor, remark="the floor"),
        Contender("Megatron fused CE", "logits", _load_megatron, **group),
        on_gpu("Liger GRPO", "logits", _load_liger_grpo, "surrogate", view="batch"),
        on_gpu("Liger vocab-parallel CE", "logits", _load_liger_vocab_parallel, view="sequence"),
    ]
    for name, load in LINEAR.items():
        found.append(on_gpu(name, "linear", lambda load=load: _weighted(load())))
        found.append(on_gpu(name, "log_probs", lambda load=load: _negated(load()), "log_probs"))
    return found
