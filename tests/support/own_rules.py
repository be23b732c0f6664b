"""Trust regions as a user would write them, for tests."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.algorithms import TrustRegionTokens, rule_options


def divergence_mask(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Weigh as DPPO does (Eq. 12)."""
    return ~(tokens.moves_away & (tokens.divergence > options["delta"]))


def steady_responses(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Keep responses whose mean divergence is at most delta."""
    return tokens.whole_responses.mean(tokens.divergence) <= options["delta"]


def fading(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh updates away from the rollout policy by 1 - D / delta, and halve it in unsteady responses."""
    far = (1 - tokens.divergence / options["delta"]).clamp(min=0)
    is_steady = tokens.whole_responses.mean(tokens.divergence) <= options["steady"]
    weight = torch.where(tokens.moves_away, far, 1.0) * torch.where(is_steady, 1.0, 0.5)
    return weight, {"far": far, "is_steady": is_steady, "place": tokens.whole_responses.num_before}


def late(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Drop the last tokens of each response, beyond a share of it; needs one pass over the logits."""
    place = tokens.positions / tokens.lengths.clamp(min=1)
    return place < options["share"], {"place": place}


def averages(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Keep responses of a mean divergence below .1."""
    return tokens.whole_responses.mean(tokens.divergence) < 0.1


def halves(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Weigh all by .5, and rows that do not learn by what no token may have."""
    return torch.where(tokens.loss_mask, 0.5, torch.nan)


def total(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Return one number, where each token needs one."""
    return tokens.divergence.sum()


def nothing(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Any:
    """Return no tensor."""
    return None


def negative(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Return weights below 0."""
    return -tokens.divergence


def infinite(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Return weights that are not finite."""
    return 1 / (tokens.divergence * 0)


def failing(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Read an option that was not given."""
    return options["absent"]


@rule_options(limit=0.2, is_soft=False)
def declared(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Drop updates away beyond a limit, or weigh them by half."""
    far = tokens.moves_away & (tokens.divergence > options["limit"])
    return torch.where(far, 0.5 if options["is_soft"] else 0.0, 1.0)


def undeclared(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Read an option that has a default."""
    return tokens.divergence <= options.get("delta", 0.2)


def drops_all(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Keep nothing, for a comparison that is the wrong way round."""
    return tokens.divergence < 0


def keeps_moved(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Keep only what has moved, so that a first step learns nothing."""
    return tokens.divergence > 0


def tail_mass(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> Tensor:
    """Keep tokens whose last outcome has nearly the same mass as before; for Top-K divergences only."""
    moved = tokens.log_masses.exp() - tokens.anchor_log_masses.exp()
    return moved[:, -1].abs() < 0.1


def measured(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Drop as DPPO does at .1, and name two values of each token; rows that do not learn have none."""
    values = {"gap": tokens.log_probs - tokens.rollout_log_probs, "is_away": tokens.moves_away}
    blank = {name: torch.where(tokens.loss_mask, value.double(), torch.nan) for name, value in values.items()}
    return ~(tokens.moves_away & (tokens.divergence > 0.1)), blank


def measured_responses(
    tokens: TrustRegionTokens, options: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Keep all, and name the length of each token's response."""
    return tokens.loss_mask, {"length": tokens.whole_responses.num_tokens}


def misnamed(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Name a value as no metric is named."""
    return tokens.loss_mask, {"the gap": tokens.divergence}


def unmeasured(tokens: TrustRegionTokens, options: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a value that is not finite."""
    return tokens.loss_mask, {"gap": 1 / (tokens.divergence * 0)}
