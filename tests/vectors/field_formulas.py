"""The field's presets by their published formulas, in mpmath, token by token, apart from the package.

Where a paper gives an objective, it is differentiated numerically, with 60 digits: a mistake in our derivation
of its gradient shows.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from mpmath import mp, mpf

mp.dps = 60
EQUAL = mpf(10) ** -40
SOURCES = {
    "ipo": "prime-rl trainer/rl/loss.py ipo_loss_fn, August 2026; its defaults since 2026-09-18",
    "ipo_2026_08": "prime-rl trainer/rl/loss.py ipo_loss_fn, August 2026; its defaults until 2026-09-18",
    "drpo": "arXiv 2606.09821: the objective whose gradient is Eq. 9",
    "cppo": "arXiv 2606.10968: Algorithm 1, Eq. 9 and 22",
    "cppo_topk": "arXiv 2606.10968: Algorithm 1, Eq. 9 and 22; its Top-K TV",
    "dppo_topk_kl_predictive": "arXiv 2607.10848: the sign of the KL's change by the next step; one tail",
    "gspo": "arXiv 2507.18071: Eq. 5 and 7",
    "icepop": "arXiv 2510.18855; NeMo-RL loss_functions.py, August 2026",
    "mis": "NeMo-RL loss_functions.py, August 2026: seq-mask-tis",
    "trm": "arXiv 2512.23075: section 4",
    "sapo": "arXiv 2511.20347: Eq. 6 to 8",
    "estr": "arXiv 2607.22186: section 4, by summaries; the Top-K partition's entropy; delta and clip ours",
    "sat": "arXiv 2607.18722: Eq. 13 to 19; its quantile over a response",
    "vespo": "arXiv 2602.10693v3: Eq. 20 and section 4.1",
    "gmpo": "arXiv 2507.20673: the geometric mean of clipped ratios, and section 4",
    "minpro": "arXiv 2601.22718, by a survey; clip ours",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ipo": {"delta": 0.3, "log_ratio_coef": 0.0},
    "ipo_2026_08": {"delta": 0.1, "log_ratio_coef": 1e-3},
    "drpo": {"delta": 12.5},
    "cppo": {"delta": 0.15, "prefix_delta": 0.02, "prefix_delta_max": 0.04, "late_weight": 0.8},
    "cppo_topk": {"delta": 0.15, "prefix_delta": 0.02, "prefix_delta_max": 0.04, "late_weight": 0.8},
    "dppo_topk_kl_predictive": {"delta": 0.15},
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "icepop": {"eps_low": 0.2, "eps_high": 0.2, "rho_low": 0.5, "rho_high": 5.0, "anchor": "recomputed"},
    "mis": {"eps_low": 0.2, "eps_high": 0.2, "rho_low": 0.999, "rho_high": 1.002, "anchor": "recomputed"},
    "trm": {"token_kl": 0.1, "response_kl": 0.002},
    "sapo": {"tau_low": 1.05, "tau_high": 1.0},
    "estr": {"delta": 1.0, "eps_low": 0.2, "eps_high": 0.2},
    "sat": {"eps_low": 0.2, "eps_high": 0.2, "stale_share": 0.9},
    "vespo": {"power_low": 3.0, "power_high": 2.0, "decay_low": 2.0, "decay_high": 3.0},
    "gmpo": {"eps_low": 0.4, "eps_high": 0.4},
    "minpro": {"eps_low": 1.0, "eps_high": 4.0},
}
OVER_RESPONSES = ("gspo", "mis", "trm", "cppo", "cppo_topk", "sat", "vespo", "gmpo", "minpro")


@dataclass(frozen=True)
class Token:
    """One token: probabilities as mpf, complete distributions if the case uses the Top-K."""

    pi: list[Any]
    mu: list[Any]
    old: Any  # of the sampled token
    a: int
    A: float
    top: tuple[int, ...]  # ids, most probable of mu first
    learns: bool = True

    @property
    def r(self) -> Any:
        """The sampled token's pi / mu."""
        return self.pi[self.a] / self.mu[self.a]

    @property
    def shift(self) -> Any:
        """|pi - mu| of the sampled token, the Binary TV."""
        return abs(self.pi[self.a] - self.mu[self.a])


@dataclass
class Decision:
    """Comparisons of one token, and how near the nearest is to turning."""

    margins: list[Any] = field(default_factory=list[Any])

    def above(self, x: Any, y: Any) -> bool:
        """Whether x > y; a difference of less than EQUAL is none."""
        gap = (x - mpf(y)) / max(1, abs(mpf(y)))
        if abs(gap) < EQUAL:
            return False
        self.margins.append(abs(gap))
        return bool(gap > 0)

    def outside(self, x: Any, low: Any, high: Any) -> bool:
        """Whether x < low or x > high."""
        is_below = self.above(low, x)
        return self.above(x, high) or is_below

    @property
    def margin(self) -> float | None:
        """The smallest."""
        return float(min(self.margins)) if self.margins else None


def mean(values: list[Any]) -> Any:
    """The arithmetic mean."""
    return sum(values) / len(values)


def quantile(values: list[Any], q: Any) -> Any:
    """Linear between the two nearest ranks, as numpy and torch define it."""
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def partition(token: Token, sampled: str) -> tuple[list[Any], list[Any], int]:
    """Masses of pi and mu of the Top-K, the sampled token and all others, and the sampled token's index."""
    ids = list(token.top)
    if token.a not in ids:
        ids = [*(ids if sampled == "union" else ids[:-1]), token.a]
    masses = [
        [p[i] for i in ids] + [sum(p[i] for i in range(len(p)) if i not in ids)] for p in (token.pi, token.mu)
    ]
    return masses[0], masses[1], ids.index(token.a)


def kl(token: Token, sampled: str) -> Any:
    """KL(mu || pi) over the partition."""
    pi, mu, _ = partition(token, sampled)
    return sum(q * mp.log(q / p) for p, q in zip(pi, mu, strict=True) if q > 0)


def tv(token: Token, sampled: str) -> Any:
    """Half the L1 distance over the partition."""
    pi, mu, _ = partition(token, sampled)
    return sum(abs(p - q) for p, q in zip(pi, mu, strict=True)) / 2


def kl_change(token: Token, sampled: str) -> Any:
    """Derivative of the KL as the logits move along A (e_a - pi), by `mpmath.diff`."""
    pi, mu, a = partition(token, sampled)

    def moved(step: Any) -> Any:
        logits = [mp.log(p) + step * token.A * ((i == a) - p) if p > 0 else None for i, p in enumerate(pi)]
        total = sum(mp.exp(z) for z in logits if z is not None)
        return sum(q * (mp.log(q) - z + mp.log(total)) for q, z in zip(mu, logits, strict=True) if q > 0)

    return mp.diff(moved, 0)


def entropy_score(token: Token, sampled: str) -> Any:
    """(log r)^2 over the entropy of mu over the partition, plus .01."""
    _, mu, _ = partition(token, sampled)
    return mp.log(token.r) ** 2 / (mpf("0.01") - sum(q * mp.log(q) for q in mu if q > 0))


def tail(y: list[Token], s: dict[str, Any]) -> Any:
    """The smallest staleness that the share of the tokens do not exceed."""
    ranked = sorted(abs(mp.log(t.pi[t.a] / anchor_of(t, s))) for t in y)
    return ranked[max(ceil(Fraction(str(s["stale_share"])) * len(y)) - 1, 0)]


def anchor_of(token: Token, s: dict[str, Any]) -> Any:
    """The probability that a clip compares with."""
    return token.old if s.get("anchor") == "recomputed" else token.mu[token.a]


def tightened(token: Token, q: Any, s: dict[str, Any], decide: Decision) -> dict[str, Any]:
    """The clip of a token, if q is the staleness at the start of the response's tail."""
    d = mp.log(token.pi[token.a] / anchor_of(token, s))
    if q == 0 or not decide.above(abs(d), q):
        return s
    side = "eps_high" if d > 0 else "eps_low"
    return s | {side: s[side] / (1 + (d / q) ** 2)}


def geometric_weight(y: list[Token], t: int, s: dict[str, Any], decide: Decision) -> Any:
    """Tokens times the derivative of the geometric mean of clipped ratios by log pi of one of them."""

    def clip(x: Any, token: Token) -> Any:
        return min(x, mpf(s["eps_high"])) if token.A > 0 else max(x, -mpf(s["eps_low"]))

    def objective(x: Any) -> Any:
        total = mpf(0)
        for i, token in enumerate(y):
            anchor = anchor_of(token, s)
            of_token = x if i == t else mp.log(token.pi[token.a] / anchor)
            total += clip(of_token, token) + mp.log(anchor / token.mu[token.a])
        return mp.exp(total / len(y))

    own = mp.log(y[t].pi[y[t].a] / anchor_of(y[t], s))
    if y[t].A > 0:
        decide.above(own, s["eps_high"])
    elif y[t].A < 0:
        decide.above(-mpf(s["eps_low"]), own)
    return len(y) * mp.diff(objective, own, direction=-1 if y[t].A > 0 else 1)


def clipped(ratio: Any, token: Token, s: dict[str, Any], decide: Decision) -> bool:
    """PPO's min(r A, clip(r) A) has the gradient 0: r is beyond the side that A pushes to."""
    if token.A > 0:
        return decide.above(ratio, 1 + mpf(s["eps_high"]))
    return token.A < 0 and decide.above(1 - mpf(s["eps_low"]), ratio)


def of_token(preset: str, token: Token, s: dict[str, Any], decide: Decision) -> tuple[Any, Any]:
    """The weight and the coefficient of grad log pi under the rules that look at tokens one by one."""
    A, r, shift, q = mpf(token.A), token.r, token.shift, token.mu[token.a]
    keep = 1
    if preset.startswith("ipo"):
        keep = not decide.above(shift, s["delta"])
    elif preset == "drpo":  # L = -A r + |A| mu (r - 1)^2 / (2 delta), by log pi
        slope = mp.diff(
            lambda x: A * mp.exp(x) - abs(A) * q * (mp.exp(x) - 1) ** 2 / (2 * mpf(s["delta"])), mp.log(r)
        )
        return slope / (r * A), slope
    elif preset == "sapo":  # 4 / tau sigmoid(tau (r - 1)) A
        tau = mpf(s["tau_high" if A > 0 else "tau_low"])
        slope = mp.diff(lambda x: 4 / tau / (1 + mp.exp(-tau * (mp.exp(x) - 1))) * A, mp.log(r))
        return slope / (r * A), slope
    elif preset == "icepop":  # min(r' A, clip(r') A) rho 1[band], r' = pi/old, rho = old/mu
        rho = (token.old if s["anchor"] == "recomputed" else token.pi[token.a]) / q
        keep = not decide.outside(rho, mpf(s["rho_low"]), mpf(s["rho_high"]))
        keep = not clipped(token.pi[token.a] / anchor_of(token, s), token, s, decide) and keep
    elif preset == "estr":
        is_far = decide.above(entropy_score(token, s["sampled_token"]), s["delta"])
        keep = not clipped(r, token, s, decide) and not is_far
    else:
        assert preset == "dppo_topk_kl_predictive"
        is_far = decide.above(kl(token, s["sampled_token"]), s["delta"])
        keep = not (decide.above(kl_change(token, s["sampled_token"]), 0) and is_far)
    return mpf(bool(keep)), bool(keep) * r * A


def of_response(preset: str, y: list[Token], s: dict[str, Any]) -> list[tuple[Any, Any, float | None]]:
    """Weight, coefficient and margin of each learning token of one response."""
    shared, found = Decision(), list[tuple[Any, Any, float | None]]()
    ratio, is_dropped, spent, weights = mpf(1), False, mpf(0), mpf(0)
    divergences = [tv(t, s["sampled_token"]) if preset == "cppo_topk" else t.shift for t in y]
    budget = min(
        max(quantile(divergences, mpf("0.9")), mpf(s.get("prefix_delta", 0))), mpf(s.get("prefix_delta_max", 0))
    )
    if preset == "gspo":
        ratio = mp.exp(mean([mp.log(t.r) for t in y]))
    elif preset == "mis":
        others = [t.old if s["anchor"] == "recomputed" else t.pi[t.a] for t in y]
        rho = mp.exp(mean([mp.log(p / t.mu[t.a]) for t, p in zip(y, others, strict=True)]))
        is_dropped = shared.outside(rho, mpf(s["rho_low"]), mpf(s["rho_high"]))
    elif preset == "trm":
        kls = [kl(t, s["sampled_token"]) for t in y]
        is_far = shared.above(max(kls), s["token_kl"])
        is_dropped = shared.above(mean(kls), s["response_kl"]) or is_far
    product = mp.exp(sum(mp.log(t.r) for t in y))
    q = tail(y, s) if preset == "sat" else None
    for t, token in enumerate(y):
        decide, keep = Decision(list(shared.margins)), not is_dropped
        importance = token.r
        if preset in ("vespo", "gmpo", "minpro"):  # the weight is in place of r
            if preset == "vespo":
                side = "high" if token.A > 0 else "low"
                weight = product ** mpf(s[f"power_{side}"]) * mp.exp(mpf(s[f"decay_{side}"]) * (1 - product))
            elif preset == "gmpo":
                weight = geometric_weight(y, t, s, decide)
            else:
                weight = token.r * min([other.r for other in y[:t]], default=1)
                weight = min(max(weight, 1 - mpf(s["eps_low"])), 1 + mpf(s["eps_high"]))
            weight = weight if token.A else mpf(1)
            found.append((weight, weight * mpf(token.A), decide.margin))
            continue
        if preset == "gspo":
            keep, importance = not clipped(ratio, token, s, decide), ratio
        elif preset == "mis":
            keep = not clipped(token.pi[token.a] / anchor_of(token, s), token, s, decide) and keep
        elif preset == "sat":
            clip = tightened(token, q, s, decide)
            keep = not clipped(token.pi[token.a] / anchor_of(token, s), token, clip, decide)
        elif preset.startswith("cppo"):  # Algorithm 1, line by line
            w = 1 - (1 - mpf(s["late_weight"])) / max(len(y) - 1, 1) * t
            z, limit = w * divergences[t], min(mpf(s["delta"]), s["delta"] + budget * weights - spent)
            keep = not decide.above(mpf(token.A) * (token.r - 1), 0) or not decide.above(z, limit)
            spent, weights = spent + z, weights + w
        elif preset not in OVER_RESPONSES:
            weight, coefficient = of_token(preset, token, s, decide) if token.A else (mpf(1), mpf(0))
            found.append((weight, coefficient, decide.margin))
            continue
        keep = keep or token.A == 0  # nothing is there to drop
        found.append((mpf(bool(keep)), bool(keep) * importance * mpf(token.A), decide.margin))
    return found


def evaluated(preset: str, responses: list[list[Token]], overrides: dict[str, Any]) -> dict[str, Any]:
    """All that a test compares, of one preset and one packed batch; `loss` holds the coefficients fixed."""
    s = {"sampled_token": "union", **DEFAULTS[preset], **overrides}
    coef, loss = mpf(s.get("log_ratio_coef", 0)), mpf(0)
    rows, slopes = list[tuple[float, float, float | None]](), list[float]()
    for response in responses:
        learning = iter(of_response(preset, y, s) if (y := [t for t in response if t.learns]) else [])
        for token in response:
            weight, coefficient, margin = next(learning) if token.learns else (mpf(0), mpf(0), None)
            rows.append((float(weight), float(coefficient), margin and float(f"{margin:.2g}")))
            square = token.learns * coef * mp.log(token.r) ** 2
            slope = token.learns * mp.diff(lambda x: coef * x**2, mp.log(token.r)) - coefficient
            loss += square - coefficient * mp.log(token.pi[token.a])
            slopes.append(float(slope))
    weights, coefficients, margins = map(list, zip(*rows, strict=True))
    found = {"preset": preset, "overrides": overrides, "loss": float(loss)}
    found |= {"weight": weights, "coefficient": coefficients, "margin": margins}
    return found | ({"slope": slopes} if coef else {})  # of the loss by log pi; else it is -coefficient
