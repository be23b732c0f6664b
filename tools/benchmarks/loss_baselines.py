"""Losses of other libraries for loss.py. Each library is imported on demand, or reported as missing.

All losses get inputs that make their gradient equal to ours: each token's cross entropy is multiplied by its
coefficient. Liger's GRPO loss is the ratio times the advantage without clipping, which has the same gradient.
QuACK's loss takes no weights: it is the plain sum, with dead rows as ignored targets. The other losses do not
know the dead rows.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.benchmarks.loss_cases import Case
from tools.benchmarks.loss_contenders import Contender, Tensors, UnavailableError, linear_inputs, linear_leaves

IGNORED = -100  # target that these libraries ignore
NEVER_CLIPS = 1e6
QUACK_CHUNK = 4096


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


def sequence_leaf(case: Case) -> Tensors:
    """Return logits [N, 1, V] (sequence, batch, vocabulary) that require a gradient."""
    return (case.restored()[:-1, None].detach().requires_grad_(),)


def grpo_leaf(case: Case) -> Tensors:
    """Return logits [1, N + 1, V] of one sequence that require a gradient. The last row predicts nothing."""
    return (case.restored()[None].detach().requires_grad_(),)


def _load_megatron() -> Callable[[Case, Tensor], Tensor]:
    fused = from_library(
        "megatron-core", "megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy"
    )

    def loss(case: Case, logits: Tensor) -> Tensor:
        return (case.coefficients * fused(logits, case.targets[:, None], dist.group.WORLD)[:, 0]).sum()

    return loss


def _load_liger_grpo() -> Callable[[Case, Tensor], Tensor]:
    grpo = from_library("liger-kernel", "liger_kernel.transformers.grpo_loss", "triton_grpo_loss")

    def loss(case: Case, logits: Tensor) -> Tensor:
        # This loss has one advantage per sequence. Token advantages are passed as rollout correction factors.
        per_token, _, _ = grpo(
            logits,
            case.rollout_log_probs[None],
            None,
            case.targets[None],
            case.advantages.new_ones(1),
            temperature=1.0,
            beta=0.0,
            eps_low=NEVER_CLIPS,
            eps_high=NEVER_CLIPS,
            inplace=True,
            vllm_is_ratio=case.advantages[None],
        )
        return per_token.sum()

    return loss


def _load_liger_vocab_parallel() -> Callable[[Case, Tensor], Tensor]:
    function = from_library(
        "liger-kernel", "liger_kernel.ops.vocab_parallel_cross_entropy", "LigerVocabParallelCEFunction"
    )

    def loss(case: Case, logits: Tensor) -> Tensor:
        smoothing = (0.0, "pytorch", "global")
        entropies = function.apply(logits, case.targets[:, None], None, IGNORED, *smoothing)
        return (case.coefficients * entropies[:, 0]).sum()

    return loss


def weighted(cross_entropies: Callable[[Case, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Make the loss of the tokens' cross entropies [N]."""

    def loss(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
        return (case.coefficients * cross_entropies(case, hidden, weight)).sum()

    return loss


def log_probs_of(cross_entropies: Callable[[Case, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Make the function for the log-probs [N] of the sampled tokens."""

    def log_probs(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
        return -cross_entropies(case, hidden, weight)

    return log_probs


def _load_liger_linear() -> Callable[[Case, Tensor, Tensor], Tensor]:
    function = from_library(
        "liger-kernel",
        "liger_kernel.ops.fused_linear_scaled_cross_entropy",
        "LigerFusedLinearScaledCrossEntropyTPFunction",
    )
    return lambda case, hidden, weight: function.apply(hidden, weight, case.targets, dist.group.WORLD)


def _load_verl() -> Callable[[Case, Tensor, Tensor], Tensor]:
    function = from_library("verl", "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy")
    return lambda case, hidden, weight: -function(hidden, weight, case.targets, 1.0, "none", None)[0]


def _load_cut_cross_entropy() -> Callable[[Case, Tensor, Tensor], Tensor]:
    function = from_library("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy")
    # Without the filter, which drops small gradients.
    return lambda case, hidden, weight: function(
        hidden, weight, case.targets, reduction="none", filter_eps=None, impl="cce"
    )


def _load_quack() -> Callable[[Case, Tensor, Tensor], Tensor]:
    function = from_library("quack-kernels", "quack.linear_cross_entropy", "chunked_linear_cross_entropy")

    def loss(case: Case, hidden: Tensor, weight: Tensor) -> Tensor:
        targets = torch.where(case.is_live, case.targets, IGNORED)
        return function(hidden, weight, targets, chunk_size=QUACK_CHUNK, ignore_index=IGNORED, reduction="sum")

    return loss


LINEAR: dict[str, Callable[[], Callable[[Case, Tensor, Tensor], Tensor]]] = {
    "Liger fused linear CE, TP": _load_liger_linear,
    "verl linear_cross_entropy": _load_verl,
    "cut-cross-entropy, exact": _load_cut_cross_entropy,
}


def baselines() -> list[Contender]:
    """Return all known losses of other libraries, installed or not."""
    contenders = [
        Contender(
            "Megatron fused CE",
            "logits",
            _load_megatron,
            sequence_leaf,
            remark="a tensor-parallel group of one",
        ),
        Contender("Liger GRPO", "logits", _load_liger_grpo, grpo_leaf, "surrogate", needs_gpu=True),
        Contender(
            "Liger vocab-parallel CE", "logits", _load_liger_vocab_parallel, sequence_leaf, needs_gpu=True
        ),
    ]
    for name, load in LINEAR.items():
        contenders.append(
            Contender(name, "linear", lambda load=load: weighted(load()), linear_leaves, needs_gpu=True)
        )
        contenders.append(
            Contender(
                name,
                "log_probs",
                lambda load=load: log_probs_of(load()),
                linear_inputs,
                "log_probs",
                needs_gpu=True,
            )
        )
    remark = "unweighted; knows the dead rows"
    contenders.append(
        Contender(
            "QuACK chunked", "linear", _load_quack, linear_leaves, "plain_loss", needs_gpu=True, remark=remark
        )
    )
    contenders.append(
        Contender(
            "QuACK chunked",
            "log_probs",
            _load_quack,
            linear_inputs,
            "plain_loss",
            needs_gpu=True,
            remark=remark,
        )
    )
    return contenders
