"""Write field_vectors.json next to this file: exact cases of the field's presets, by `field_formulas`.

    python -m tests.vectors.make_field_vectors

The file's `others` stay as they are: what functions of other frameworks gave on these cases, each with its name
and the commit or version that it was run `at`. Their code is not here.
"""

import json
import random
from pathlib import Path
from typing import Any

from tests.vectors.field_formulas import (
    DEFAULTS,
    SOURCES,
    Token,
    entropy_score,
    evaluated,
    kl,
    mean,
    mp,
    mpf,
    quantile,
    tail,
    tv,
)

FILE = Path(__file__).parent / "field_vectors.json"
TOPK = ("cppo_topk", "dppo_topk_kl_predictive", "trm", "estr")
Rule = tuple[str, dict[str, Any]]
EACH: list[Rule] = [(preset, {}) for preset in DEFAULTS]
WIDER: list[Rule] = [
    ("ipo", {"delta": 0.1, "log_ratio_coef": 1e-3}),  # its defaults until 2026-09-18
    ("ipo", {"delta": 0.25, "log_ratio_coef": 0.5}),
    ("drpo", {"delta": 0.15}),
    ("sapo", {"tau_low": 3.0, "tau_high": 0.5}),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.3}),
    ("icepop", {"eps_high": 0.5, "rho_low": 0.8, "rho_high": 1.3}),
    ("icepop", {"anchor": "rollout"}),
    ("mis", {"rho_low": 0.8, "rho_high": 1.3}),
    ("mis", {"rho_low": 0.8, "rho_high": 1.3, "anchor": "rollout"}),
    ("trm", {"token_kl": 0.9, "response_kl": 0.3}),
    ("trm", {"token_kl": 0.9, "response_kl": 0.3, "sampled_token": "replace"}),
    ("dppo_topk_kl_predictive", {"delta": 0.02, "sampled_token": "replace"}),
    ("cppo", {"late_weight": 0.2, "prefix_delta": 0.1, "prefix_delta_max": 0.3}),
    ("cppo", {"late_weight": 1.0, "prefix_delta": 1e9, "prefix_delta_max": 1e9}),
    ("cppo_topk", {"delta": 0.3, "prefix_delta": 0.0, "sampled_token": "replace"}),
    ("estr", {"delta": 0.02, "eps_low": 0.5, "eps_high": 0.9, "sampled_token": "replace"}),
    ("sat", {"eps_low": 0.3, "eps_high": 0.6, "stale_share": 0.5}),
    ("sat", {"stale_share": 0.4, "anchor": "recomputed"}),
    ("vespo", {"power_low": 0.5, "power_high": 1.0, "decay_low": 1.0, "decay_high": 0.25}),
    ("gmpo", {"eps_low": 0.1, "eps_high": 0.3}),
    ("gmpo", {"eps_low": 0.1, "anchor": "recomputed"}),
    ("minpro", {"eps_low": 0.2, "eps_high": 0.28}),
]


def softmax(logits: list[float]) -> list[Any]:
    """Exact to 60 digits."""
    masses = [mp.exp(mpf(z)) for z in logits]
    return [m / sum(masses) for m in masses]


def drawn(
    rng: random.Random, lengths: list[int], moved: float, *, columns: int = 4, size: int = 9
) -> list[list[Token]]:
    """Responses whose policies differ by about so much in each logit; signs of A in turn, one of them 0."""
    responses = list[list[Token]]()
    for number, length in enumerate(lengths):
        response = list[Token]()
        for _ in range(length):
            logits = [round(rng.gauss(0, 2), 3) for _ in range(size)]
            other = [z + round(rng.gauss(0, moved), 5) for z in logits]
            between = [z + round(rng.gauss(0, moved / 2), 5) for z in logits]
            pi, mu, old = softmax(other), softmax(logits), softmax(between)
            a = rng.choices(range(size), weights=[float(q) for q in mu])[0]
            if rng.random() < 0.25:
                a = min(range(size), key=lambda i: logits[i])  # outside the Top-K
            top = tuple(sorted(range(size), key=lambda i: -logits[i])[:columns])
            advantage = (1.5, -1.0, 0.7, -0.5, 0.0)[number % 5]
            response.append(Token(pi, mu, old[a], a, advantage, top, learns=rng.random() < 0.85))
        responses.append(response)
    return responses


def binary(A: float, *tokens: tuple[float, float, float]) -> list[Token]:
    """A response of tokens (pi, mu, old), two outcomes each; exact floats if the numbers are dyadic."""
    pairs = [([mpf(pi), 1 - mpf(pi)], [mpf(mu), 1 - mpf(mu)], mpf(old)) for pi, mu, old in tokens]
    return [Token(p, q, old, 0, A, (0, 1) if q[0] >= q[1] else (1, 0)) for p, q, old in pairs]


def at_thresholds() -> list[tuple[str, list[list[Token]], list[Rule]]]:
    """Cases in which the compared numbers are equal: each rule decides whether that is inside."""
    up, down = (0.5, 0.25, 0.25), (0.25, 0.5, 0.5)
    signs = [binary(1.0, up), binary(-1.0, up), binary(1.0, down), binary(-1.0, down), binary(0.0, up)]
    rho = [
        binary(1.0, (0.25, 0.5, 0.25)),
        binary(-1.0, (0.25, 0.0625, 0.25)),
        binary(1.0, (0.125, 0.25, 0.0625)),
    ]
    clip = {"eps_low": 0.5, "eps_high": 1.0}
    budget = {"delta": 0.25, "late_weight": 0.5, "prefix_delta": 0.125, "prefix_delta_max": 0.125}
    of_tokens: list[Rule] = [("ipo", {"delta": 0.25}), ("drpo", {"delta": 0.25}), ("cppo", {"delta": 0.25})]
    of_tokens += [("gspo", clip), ("icepop", clip), ("cppo_topk", {"delta": 0.25})]
    bands: list[Rule] = [(name, clip | {"rho_low": 0.25, "rho_high": 4.0}) for name in ("icepop", "mis")]
    return [
        ("each sign at the threshold", signs, of_tokens),
        (
            "a response at the threshold",
            [binary(1.0, up, up), binary(-1.0, down, down)],
            [("gspo", clip), ("mis", {**clip, "rho_low": 1.0})],
        ),
        (
            "the prefix budget used up",
            [binary(1.0, up, up), binary(-1.0, down, down)],
            [("cppo", budget), ("cppo_topk", budget)],
        ),
        ("rho at its bounds", rho, bands),
    ]


def beside(responses: list[list[Token]]) -> list[Rule]:
    """Thresholds 1e-9 above and below what the first response is compared with."""
    first = [t for t in responses[0] if t.learns]
    s = mp.exp(mean([mp.log(t.r) for t in first]))
    rho = mp.exp(mean([mp.log(t.old / t.mu[t.a]) for t in first]))
    eps, bound = "eps_high" if s > 1 else "eps_low", "rho_high" if rho > 1 else "rho_low"
    near: list[tuple[str, str, Any, dict[str, Any]]] = [
        ("ipo", "delta", first[0].shift, {}),
        ("cppo", "delta", first[0].shift, {}),
        ("gspo", eps, abs(s - 1), {}),
        ("mis", bound, rho, {"rho_low": 0.01, "rho_high": 100.0}),
    ]
    far = max(first, key=lambda t: abs(mp.log(t.r)))
    d, side = mp.log(far.r), "eps_high" if far.r > 1 else "eps_low"
    contraction = 1 + (d / tail(first, {"stale_share": 0.5})) ** 2
    near += [
        ("gmpo", "eps_high" if first[0].A > 0 else "eps_low", abs(mp.log(first[0].r)), {}),
        ("sat", side, abs(far.r - 1) * contraction, {"stale_share": 0.5}),
    ]
    for joining in ("union", "replace"):
        wide = {"sampled_token": joining, "eps_low": 0.999, "eps_high": 1e9}
        near.append(("estr", "delta", entropy_score(first[0], joining), wide))
        kls, other = [kl(t, joining) for t in first], {"sampled_token": joining}
        near += [
            ("trm", "token_kl", max(kls), {"response_kl": 50.0, **other}),
            ("trm", "response_kl", mean(kls), {"token_kl": 50.0, **other}),
            ("dppo_topk_kl_predictive", "delta", kls[0], other),
            ("cppo_topk", "delta", tv(first[0], joining), other),
        ]
    return [(name, {**o, key: float(x) * f}) for name, key, x, o in near for f in (1 + 1e-9, 1 - 1e-9)]


def beside_the_budget(y: list[Token], late: float, least: float) -> list[Rule]:
    """Deltas 1e-9 above and below what each token of a response has to spend, its budget at least that much."""
    weights = [1 - (1 - mpf(late)) * t / (len(y) - 1) for t in range(len(y))]
    spent = [w * t.shift for w, t in zip(weights, y, strict=True)]
    budget = max(quantile([t.shift for t in y], mpf("0.9")), mpf(least))
    found = list[Rule]()
    for t in range(1, len(y)):
        limit = sum(spent[: t + 1]) - budget * sum(weights[:t])
        if limit > spent[t] and y[t].A * (y[t].r - 1) > 0:
            own = {"late_weight": late, "prefix_delta": least, "prefix_delta_max": 1e9}
            found += [("cppo", {"delta": float(limit) * factor, **own}) for factor in (1 + 1e-9, 1 - 1e-9)]
    return found


def batches() -> list[tuple[str, list[list[Token]], list[Rule]]]:
    """By name, packed responses and the presets that are evaluated on them."""
    rng = random.Random(21)
    far = drawn(rng, [6, 1, 0, 5, 3, 4], 0.8)
    growing = [[t for step in range(16) for t in drawn(rng, [1], 0.05 * step)[0]]]
    moves = (0.4, 0.05, 0.1, 0.08, 0.06, 0.02, 0.03, 0.01)
    shrinking = [binary(1.0, *[(0.3 + move, 0.3, 0.3) for move in moves])]
    of_shrinking = [
        rule for own in ((1.0, 0.0), (0.5, 0.0), (0.5, 0.25)) for rule in beside_the_budget(shrinking[0], *own)
    ]
    still = [[Token(t.mu, t.mu, t.mu[t.a], t.a, t.A, t.top, t.learns) for t in y] for y in far]
    topk: list[Rule] = [rule for rule in EACH + WIDER if rule[0] in TOPK]
    of_budget: list[Rule] = [rule for rule in EACH + WIDER if rule[0] in ("cppo", "cppo_topk", "sat", "minpro")]
    return [
        ("moved far", far, EACH + WIDER + beside(far)),
        ("moved a little", drawn(rng, [4, 2, 1, 3, 2], 0.08), EACH + WIDER),
        ("hardly moved", drawn(rng, [5, 3, 2, 4, 1, 3, 4, 2, 2, 3], 1e-3), EACH),
        ("not moved", still, [*EACH, ("trm", {"token_kl": 0.0, "response_kl": 0.0})]),
        (
            "signs mixed in a response",
            [[t for y in zip(*drawn(rng, [3, 3, 3], 0.4), strict=True) for t in y]],
            EACH + WIDER,
        ),
        ("divergence grows", growing, of_budget),
        ("divergence shrinks", shrinking, of_shrinking),
        ("the Top-K is the vocabulary", drawn(rng, [4, 3], 0.5, columns=4, size=4), topk),
        ("one column", drawn(rng, [4, 3], 0.5, columns=1), topk),
        *at_thresholds(),
    ]


def as_json(name: str, responses: list[list[Token]], rules: list[Rule]) -> dict[str, Any]:
    """Inputs rounded to float64, and what each preset makes of them."""
    tokens = [t for y in responses for t in y]

    def logs(values: list[Any]) -> list[float]:
        return [float(mp.log(p)) for p in values]

    return {
        "name": name,
        "lengths": [len(y) for y in responses],
        "learns": [t.learns for t in tokens],
        "advantages": [t.A for t in tokens],
        "targets": [t.a for t in tokens],
        "log_probs": logs([t.pi[t.a] for t in tokens]),
        "rollout_log_probs": logs([t.mu[t.a] for t in tokens]),
        "old_log_probs": logs([t.old for t in tokens]),
        "topk_ids": [list(t.top) for t in tokens],
        "topk_log_probs": [logs([t.pi[i] for i in t.top]) for t in tokens],
        "topk_rollout_log_probs": [logs([t.mu[i] for i in t.top]) for t in tokens],
        "rules": [evaluated(preset, responses, overrides) for preset, overrides in rules],
    }


def main() -> None:
    """Write the file."""
    others = json.loads(FILE.read_text())["others"] if FILE.exists() else []
    cases = [as_json(*batch) for batch in batches()]
    written = {"sources": SOURCES, "cases": cases, "others": others}
    FILE.write_text(json.dumps(written, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
