"""Inputs of the policy loss, validated, with masked tokens replaced by neutral values."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.divergence import TopKLogProbs
from megatron_dppo.algorithms.objective import Objective
from megatron_dppo.algorithms.trust_region import Responses, require_lengths
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.types import ROLLOUT_TOKENS, RolloutTokens

# Log-probs between 0 and this are rounding and not worth a count.
CLAMP_COUNTED_FROM = 1e-3


@dataclass(frozen=True, eq=False)
class PolicyLossInputs:
    """One micro-batch of T packed tokens. Values outside `loss_mask` are ignored, even NaN.

    Computation is in float64 if `log_probs` is float64, and in float32 otherwise.
    """

    log_probs: Tensor  # [T] log pi(y_t) of the policy being trained; the only one that is differentiated
    rollout_log_probs: Tensor  # [T] log mu(y_t) of the policy that sampled
    advantages: Tensor  # [T]
    loss_mask: Tensor | None = None  # [T] bool: the tokens that learn; none means all
    old_log_probs: Tensor | None = None  # [T] log pi'(y_t) before the step; read only for anchor = "recomputed"
    ref_log_probs: Tensor | None = None  # [T] log-probs of the reference; read only if ref_kl_coef is not 0
    topk: TopKLogProbs | None = None  # [T, K'] each; read only by Top-K divergences
    targets: Tensor | None = None  # [T] integer ids y_t; read only by Top-K divergences
    token_weights: Tensor | None = None  # [T] >= 0: multiplies each token's loss; none means 1
    entropy: Tensor | None = None  # [T] with gradient; read only if entropy_coef is not 0
    response_lengths: Tensor | None = None  # [B] int64, sums to T; read only by rules over complete responses

    @classmethod
    def of(
        cls,
        tokens: RolloutTokens,
        log_probs: Tensor,
        *,
        topk_log_probs: Tensor | None = None,
        entropy: Tensor | None = None,
        response_lengths: Tensor | None = None,
    ) -> "PolicyLossInputs":
        """Join the record of a rollout's tokens with the policy's log-probs of them.

        Args:
            tokens: T tokens.
            log_probs: [T] log pi(y_t).
            topk_log_probs: [T, K'] log pi of the first K' columns of the rollout's Top-K; `None` for no Top-K.
            entropy: [T].
            response_lengths: [B] packed tokens of each response.
        """
        shared = {name: getattr(tokens, name) for name in ROLLOUT_TOKENS}
        mu = shared.pop("topk")
        topk = None
        if mu is not None and topk_log_probs is not None:
            used = slice(None, topk_log_probs.shape[1])
            topk = TopKLogProbs(mu.ids[:, used], mu.log_probs[:, used], topk_log_probs)
        of_policy = {"log_probs": log_probs, "topk": topk, "entropy": entropy}
        return cls(**of_policy, response_lengths=response_lengths, **shared)


@dataclass(frozen=True, eq=False)
class LearningTokens:
    """Checked inputs in one dtype: ignored rows are neutral (log-probs, A and weight 0), log-probs are <= 0."""

    is_learning: Tensor  # [T] bool
    trained_log_probs: Tensor  # [T] with gradient, and not clamped; nothing else but `entropy` has one
    log_probs: Tensor
    rollout_log_probs: Tensor
    anchor_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    token_weights: Tensor
    num_clamped: Tensor  # scalar: learning tokens with a log-prob above CLAMP_COUNTED_FROM
    topk: TopKLogProbs | None
    targets: Tensor | None
    entropy: Tensor | None
    responses: Responses | None


def learning_tokens(
    objective: Objective, inputs: PolicyLossInputs, *, has_known_values: bool = False
) -> LearningTokens:
    """Check the inputs that `objective` reads, and neutralise the rows that do not learn.

    Neutralising comes before all arithmetic, so a NaN of an ignored row reaches neither value nor gradient.
    Set `has_known_values` if a loss was computed from these inputs before. Their values are then not checked
    again, and the call does not synchronise with the device.

    Raises:
        ConfigError: An input is missing, has the wrong shape or type, or an invalid value for a learning token.
    """
    present = _inputs_read(objective, inputs)
    _check_shapes(present)
    lengths = inputs.response_lengths if objective.needs_responses else None
    if lengths is not None and not has_known_values:
        require_lengths(lengths, inputs.log_probs.numel(), objective.name)
    dtype = torch.float64 if inputs.log_probs.dtype == torch.float64 else torch.float32
    is_learning = torch.ones_like(inputs.log_probs, dtype=torch.bool)
    if inputs.loss_mask is not None:
        is_learning = inputs.loss_mask != 0

    def clean(values: Tensor) -> Tensor:
        return torch.where(is_learning, values.to(dtype), 0.0)

    trained, rollout = clean(inputs.log_probs), clean(inputs.rollout_log_probs.detach())
    old = present.get("old_log_probs")
    anchor = rollout if old is None else clean(old.detach())
    ref, weights = present.get("ref_log_probs"), inputs.token_weights
    tokens = LearningTokens(
        is_learning=is_learning,
        trained_log_probs=trained,
        log_probs=trained.detach(),
        rollout_log_probs=rollout,
        anchor_log_probs=anchor,
        ref_log_probs=None if ref is None else clean(ref.detach()),
        advantages=clean(inputs.advantages.detach()),
        token_weights=clean(torch.ones_like(rollout) if weights is None else weights.detach()),
        num_clamped=(torch.stack([trained.detach(), rollout, anchor]) > CLAMP_COUNTED_FROM).any(0).sum(),
        topk=_clean_topk(objective, inputs.topk, is_learning, dtype) if "topk.ids" in present else None,
        targets=torch.where(is_learning, present["targets"].long(), 0) if "targets" in present else None,
        entropy=clean(present["entropy"]) if "entropy" in present else None,
        responses=None if lengths is None else Responses(lengths.long(), is_learning),
    )
    if not has_known_values:
        _check_values(tokens)
    return _clamped(tokens)


def _clean_topk(
    objective: Objective, topk: TopKLogProbs | None, is_learning: Tensor, dtype: torch.dtype
) -> TopKLogProbs:
    """The columns in use; ignored rows become padding, and the log-probs of padding -inf."""
    assert topk is not None, "required inputs are checked first"
    used = slice(None, objective.top_k)
    ids = torch.where(is_learning[:, None], topk.ids[:, used].long(), -1)

    def clean(columns: Tensor) -> Tensor:
        return torch.where(ids >= 0, columns.detach()[:, used].to(dtype), -math.inf)

    return TopKLogProbs(ids, rollout_log_probs=clean(topk.rollout_log_probs), log_probs=clean(topk.log_probs))


def _clamped(tokens: LearningTokens) -> LearningTokens:
    """Rounding leaves log-probs of certain tokens a little above 0; the divergences need them at most 0."""
    topk = tokens.topk
    if topk is not None:
        topk = TopKLogProbs(topk.ids, topk.rollout_log_probs.clamp(max=0), topk.log_probs.clamp(max=0))
    return replace(
        tokens,
        log_probs=tokens.log_probs.clamp(max=0),
        rollout_log_probs=tokens.rollout_log_probs.clamp(max=0),
        anchor_log_probs=tokens.anchor_log_probs.clamp(max=0),
        topk=topk,
    )


def _inputs_read(objective: Objective, inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """The tensors that `objective` reads, by name; raises naming those it needs and did not get."""
    topk = inputs.topk
    needed: dict[str, Tensor | None] = {
        "log_probs": inputs.log_probs,
        "rollout_log_probs": inputs.rollout_log_probs,
        "advantages": inputs.advantages,
    }
    if objective.anchor == "recomputed":
        needed["old_log_probs"] = inputs.old_log_probs
    if objective.ref_kl_coef != 0:
        needed["ref_log_probs"] = inputs.ref_log_probs
    if objective.needs_topk:
        needed["targets"] = inputs.targets
        needed["topk.ids"] = None if topk is None else topk.ids
        needed["topk.rollout_log_probs"] = None if topk is None else topk.rollout_log_probs
        needed["topk.log_probs"] = None if topk is None else topk.log_probs
    if objective.entropy_coef != 0:
        needed["entropy"] = inputs.entropy
    missing = dict.fromkeys(name.split(".")[0] for name, tensor in needed.items() if tensor is None)
    if objective.needs_responses and inputs.response_lengths is None:
        missing["response_lengths"] = None
    if missing:
        raise ConfigError([_missing(objective, name) for name in missing])
    optional = {"loss_mask": inputs.loss_mask, "token_weights": inputs.token_weights}
    return {name: tensor for name, tensor in (needed | optional).items() if tensor is not None}


def _missing(objective: Objective, name: str) -> Problem:
    expected = {
        "old_log_probs": "a [T] tensor, because anchor = 'recomputed'",
        "ref_log_probs": "a [T] tensor, because ref_kl_coef is not 0",
        "topk": f"a TopKLogProbs, because the divergence is {objective.divergence}",
        "targets": f"a [T] tensor of sampled ids, because the divergence is {objective.divergence}",
        "entropy": "a [T] tensor with gradient, because entropy_coef is not 0",
        "response_lengths": "a [B] tensor of integers, because the rule reads complete responses",
    }.get(name, "a [T] tensor")
    return Problem(f"PolicyLossInputs.{name} of {objective.name}", "none", expected, f"Pass {name}=...")


def _check_shapes(present: dict[str, Tensor]) -> None:
    """Every tensor is [T], or [T, K'] for Top-K, and of a kind that fits; all faults at once."""
    real, mask, integer = ("floating", "integer"), ("bool", "integer"), ("integer",)
    kinds = {
        "loss_mask": mask,
        "targets": integer,
        "topk.ids": integer,
        "advantages": real,
        "token_weights": real,
    }
    tokens = present["log_probs"].shape[:1]
    columns = present["topk.ids"].shape[1:2] if "topk.ids" in present else torch.Size()
    problems: list[Problem] = []
    for name, tensor in present.items():
        is_topk = name.startswith("topk.")
        shape = tokens + columns if is_topk else tokens
        if tensor.dim() != 1 + is_topk or tensor.shape != shape:
            expected = "[T, K'] like topk.ids, with the T of log_probs" if is_topk else "[T] like log_probs"
            found = f"shape {list(tensor.shape)}"
            action = "Pack every input the same way, one row for each position that scores a token."
            problems.append(Problem(f"PolicyLossInputs.{name}", found, expected, action))
        allowed = kinds.get(name, ("floating",))
        if _kind(tensor) not in allowed:
            expected = " or ".join(allowed) + " numbers"
            action = f"Convert {name} when you build the batch."
            problems.append(Problem(f"PolicyLossInputs.{name}", str(tensor.dtype), expected, action))
    if columns == (0,) and tokens != (0,):
        action = "Set rollout.num_topk_log_probs to at least algorithm.top_k."
        problems.append(Problem("PolicyLossInputs.topk", "no columns", "at least one", action))
    if problems:
        raise ConfigError(problems)


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "floating" if tensor.is_floating_point() else "integer"


def _check_values(tokens: LearningTokens) -> None:
    """Refuse values that would silently keep or spoil a learning token; synchronises with the device once.

    A NaN of `log_probs` passes: it makes loss_sum NaN, and the training step skips losses that are not finite.
    """
    faults: list[tuple[str, Tensor, Tensor, str, str]] = [
        (
            "rollout_log_probs",
            tokens.rollout_log_probs,
            ~tokens.rollout_log_probs.isfinite(),
            "finite log-probs of the tokens that learn",
            "Send the log-probs of the sampling distribution, or leave such tokens out with loss_mask.",
        ),
        (
            "old_log_probs",
            tokens.anchor_log_probs,
            tokens.anchor_log_probs.isnan(),
            "no NaN",
            "Recompute them.",
        ),
        (
            "advantages",
            tokens.advantages,
            ~tokens.advantages.isfinite(),
            "finite numbers",
            "Check the rewards.",
        ),
        (
            "token_weights",
            tokens.token_weights,
            ~(tokens.token_weights.isfinite() & (tokens.token_weights >= 0)),
            "finite numbers >= 0",
            "Make them with token_weights().",
        ),
    ]
    if tokens.ref_log_probs is not None:
        ref = tokens.ref_log_probs
        expected, action = "finite log-probs", "Use a reference that gives every sampled token a probability."
        faults.append(("ref_log_probs", ref, ~ref.isfinite(), expected, action))
    if tokens.topk is not None and tokens.targets is not None:
        topk = tokens.topk
        ids = topk.ids.sort(dim=1).values
        is_repeated = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        pad, zero = "Pad unused columns with -1.", "Send -inf for tokens of no probability."
        mu, pi = topk.rollout_log_probs, topk.log_probs
        faults += [
            ("topk.ids", topk.ids, is_repeated.any(1), "distinct ids in each row", pad),
            ("topk.rollout_log_probs", mu, mu.isnan().any(1), "no NaN in the used columns", zero),
            ("topk.log_probs", pi, pi.isnan().any(1), "no NaN in the used columns", zero),
            ("targets", tokens.targets, tokens.targets < 0, "token ids >= 0", "Leave them out with loss_mask."),
        ]
    if bool(torch.stack([is_bad.any() for _, _, is_bad, _, _ in faults]).any()):
        raise ConfigError([_bad_rows(*fault) for fault in faults if bool(fault[2].any())])


def _bad_rows(name: str, values: Tensor, is_bad: Tensor, expected: str, action: str) -> Problem:
    first = int(is_bad.nonzero()[0, 0])
    value = ", ".join(f"{float(x):g}" for x in values[first].reshape(-1))
    found = f"{value} at position {first} ({int(is_bad.sum())} learning tokens in all)"
    return Problem(f"PolicyLossInputs.{name}", found, expected, action)
