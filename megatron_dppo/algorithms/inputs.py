"""Inputs of the policy loss and of a trust-region rule, and their checks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32, Int64, Integer
from torch import Tensor

from megatron_dppo.algorithms.divergence import TopKLogProbs
from megatron_dppo.algorithms.responses import Responses
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.types import ROLLOUT_TOKENS, RolloutTokens

RULE_DIVERGENCE, RULE_OVER = "algorithm.rule_divergence", "algorithm.rule_over"
"""Settings of a custom rule that give it log-masses or responses."""
# Log-probs between 0 and this are rounding and not worth a count.
CLAMP_COUNTED_FROM = 1e-3


@dataclass(frozen=True, eq=False)
class PolicyLossInputs:
    """One micro-batch of T packed tokens. Values outside `loss_mask` are ignored, even NaN.

    Computation is in float64 if `log_probs` is float64, and in float32 otherwise.
    """

    log_probs: Float[Tensor, " T"]  # log pi(y_t) of the trained policy; the only one that is differentiated
    rollout_log_probs: Float[Tensor, " T"]  # log mu(y_t) of the policy that sampled
    advantages: Float[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"] | None = None  # the tokens that learn; none means all
    old_log_probs: Float[Tensor, " T"] | None = None  # log pi'(y_t) before the step; for anchor = "recomputed"
    ref_log_probs: Float[Tensor, " T"] | None = None  # of the reference; read only if ref_kl_coef is not 0
    topk: TopKLogProbs | None = None  # read only by Top-K divergences
    targets: Integer[Tensor, " T"] | None = None  # ids y_t; read only by Top-K divergences
    token_weights: Float[Tensor, " T"] | None = None  # >= 0: multiplies each token's loss; none means 1
    entropy: Float[Tensor, " T"] | None = None  # with gradient; read only if entropy_coef is not 0
    response_lengths: Int64[Tensor, " B"] | None = None  # sums to T; read only by rules over complete responses
    positions: Integer[Tensor, " T"] | None = None  # of `place_of_tokens`; read only by custom rules
    lengths: Integer[Tensor, " T"] | None = None  # of `place_of_tokens`; read only by custom rules

    @classmethod
    def of(
        cls,
        tokens: RolloutTokens,
        log_probs: Float[Tensor, " T"],
        *,
        topk_log_probs: Float[Tensor, "T K"] | None = None,
        entropy: Float[Tensor, " T"] | None = None,
        response_lengths: Integer[Tensor, " B"] | None = None,
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
class TrustRegionTokens:
    """Checked inputs in one dtype: of a trust-region rule, and of the loss. Log-probs are <= 0.

    Rows that do not learn are neutral: log-probs and advantage 0, divergence 0, weight 0. The divergence is 0
    until an objective compares the policies. Only `trained` and `entropy` have a gradient.
    """

    log_probs: Float[Tensor, " T"]  # log pi(a)
    anchor_log_probs: Float[Tensor, " T"]  # of the policy that the rule compares with: mu, or pi' if recomputed
    rollout_log_probs: Float[Tensor, " T"]  # log mu(a)
    advantages: Float[Tensor, " T"]
    divergence: Float[Tensor, " T"]  # of pi from the anchor, the one that the objective names
    loss_mask: Bool[Tensor, " T"]  # the tokens that learn
    outcomes: tuple[Tensor, Tensor] | None = None  # log-masses of a Top-K divergence; None for others
    responses: Responses | None = None  # for rules over complete responses
    places: tuple[Tensor, Tensor] | None = None  # `positions` and `lengths`, if they are known
    # Only the loss reads these:
    trained: Float[Tensor, " T"] | None = None  # log pi(a) with gradient, and not clamped
    weights: Float[Tensor, " T"] | None = None  # 0 for rows that do not learn; None: 1 everywhere
    num_clamped: Integer[Tensor, ""] | None = None  # learning tokens with a log-prob above CLAMP_COUNTED_FROM
    ref_log_probs: Float[Tensor, " T"] | None = None
    topk: TopKLogProbs | None = None  # the columns in use; rows that do not learn are padding
    targets: Integer[Tensor, " T"] | None = None
    entropy: Float[Tensor, " T"] | None = None

    @property
    def trained_log_probs(self) -> Float[Tensor, " T"]:
        """Log pi(a) of the loss, with gradient."""
        return self.log_probs if self.trained is None else self.trained

    @property
    def token_weights(self) -> Float[Tensor, " T"]:
        """Weight of each token in the loss."""
        return torch.ones_like(self.log_probs) if self.weights is None else self.weights

    @property
    def anchor_ratio(self) -> Float[Tensor, " T"]:
        """pi(a) over the anchor's; the importance weight is pi/mu."""
        return (self.log_probs - self.anchor_log_probs).exp()

    @property
    def is_above(self) -> Bool[Tensor, " T"]:
        """Whether pi(a) is above the anchor's, read off log-probs, which resolve what rounds to 1."""
        return self.log_probs > self.anchor_log_probs

    @property
    def is_below(self) -> Bool[Tensor, " T"]:
        """Whether pi(a) is below the anchor's."""
        return self.log_probs < self.anchor_log_probs

    @property
    def moves_away(self) -> Bool[Tensor, " T"]:
        """Whether the update would push pi(a) further from the anchor; False if A = 0."""
        return by_sign(self.advantages, self.is_above, self.is_below)

    @property
    def moves_back(self) -> Bool[Tensor, " T"]:
        """Whether the update would bring pi(a) back to the anchor; False if A = 0."""
        return by_sign(self.advantages, self.is_below, self.is_above)

    def of_sign(self, of_positive: float, of_negative: float) -> Float[Tensor, " T"]:
        """Return `of_positive` if A > 0, else `of_negative`."""
        return torch.where(
            self.advantages > 0,
            self.log_probs.new_full((), of_positive),
            self.log_probs.new_full((), of_negative),
        )

    @property
    def log_masses(self) -> Float[Tensor, "T outcomes"]:
        """Log pi of a Top-K divergence's outcomes, in the order of `topk_partition`.

        Raises:
            ConfigError: The rule is a custom one, and its divergence reads only the sampled token.
        """
        return self._of_outcomes[0]

    @property
    def anchor_log_masses(self) -> Float[Tensor, "T outcomes"]:
        """Log mu of the same outcomes. Raises what `log_masses` does."""
        return self._of_outcomes[1]

    @property
    def _of_outcomes(self) -> tuple[Tensor, Tensor]:
        if self.outcomes is None:
            found = "a divergence of only the sampled token, but the rule reads log_masses"
            raise ConfigError(Problem(RULE_DIVERGENCE, found, "'topk_tv' or 'topk_kl'", "Set one of them."))
        return self.outcomes

    @property
    def positions(self) -> Integer[Tensor, " T"]:
        """Index of each token among its response's learning tokens, from 0; ConfigError if none was passed."""
        return self._places[0]

    @property
    def lengths(self) -> Integer[Tensor, " T"]:
        """Number of learning tokens of each token's response; ConfigError if none was passed."""
        return self._places[1]

    @property
    def _places(self) -> tuple[Tensor, Tensor]:
        if self.places is None:
            expected, action = "[T], as the rule reads it", "Pass positions and lengths of `place_of_tokens`."
            raise ConfigError(Problem("PolicyLossInputs.positions", "none", expected, action))
        return self.places

    @property
    def whole_responses(self) -> Responses:
        """The responses, for a rule that reads complete responses.

        Raises:
            ConfigError: The rule is a custom one, and `rule_over` is not "responses".
        """
        if self.responses is None:
            found = "'tokens', but the rule reads complete responses"
            raise ConfigError(Problem(RULE_OVER, found, "'responses'", "Set it so."))
        return self.responses


def by_sign(
    advantages: Float[Tensor, " T"], of_positive: Bool[Tensor, " T"], of_negative: Bool[Tensor, " T"]
) -> Bool[Tensor, " T"]:
    """Choose by the sign of A; False if A = 0."""
    return ((advantages > 0) & of_positive) | ((advantages < 0) & of_negative)


def place_of_tokens(
    loss_mask: Bool[Tensor, " R"],
) -> tuple[Int32[Tensor, " R"], Int32[Tensor, " R"]]:
    """Return the index of each token among its response's learning tokens, from 0, and their number.

    Args:
        loss_mask: [R] the tokens of one response that learn. Both results are 0 for the others.
    """
    places = loss_mask.cumsum(0) - 1
    return (places * loss_mask).int(), (loss_mask.sum() * loss_mask).int()


def check_shapes(present: dict[str, Tensor]) -> None:
    """Every tensor is [T], or [T, K'] for Top-K, and of a kind that fits; all faults at once."""
    real, mask, integer = ("floating", "integer"), ("bool", "integer"), ("integer",)
    kinds = {
        "loss_mask": mask,
        "targets": integer,
        "topk.ids": integer,
        "positions": integer,
        "lengths": integer,
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


def check_values(tokens: TrustRegionTokens) -> None:
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
