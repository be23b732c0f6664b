"""Clipped tokens: counted where they are masked, whoever held them, most frequent first."""

import pickle

import pytest
import torch

from megatron_dppo.metrics.clipped_tokens import ClippedTokens

NUM_TOKENS = 400


def _tokens(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(NUM_TOKENS, generator=generator)

    return {
        "targets": torch.randint(0, 9, (NUM_TOKENS,), generator=generator),
        "log_probs": uniform().log(),
        "rollout_log_probs": uniform().log(),
        "entropy": 3 * uniform(),
        "advantages": torch.randint(-1, 2, (NUM_TOKENS,), generator=generator).float(),
        "loss_mask": uniform() < 0.9,
        "half": uniform() < 0.5,
        "most": uniform() < 0.9,
    }


def _counted(values: dict[str, torch.Tensor]) -> ClippedTokens:
    masks = {name: values[name] for name in ("half", "most")}
    counted = ClippedTokens()
    counted.add(masks, **{name: value for name, value in values.items() if name not in masks})
    return counted


def _rows(counted: ClippedTokens, top: int = 50) -> list[dict]:
    return list(counted.rows(lambda ids: f"<{ids[0]}>", top))


def test_every_masked_token_is_counted_once() -> None:
    values = _tokens()
    rows = _rows(_counted(values))
    assert [(row["preset"], row["sign"]) for row in rows] == sorted(
        (row["preset"], row["sign"]) for row in rows
    )
    for row in rows:
        sign = values["advantages"] > 0 if row["sign"] == "+" else values["advantages"] < 0
        of_mask = sign & values["loss_mask"] & ~values[row["preset"]]
        chosen = of_mask & (values["targets"] == row["token_id"])
        pi, mu = values["log_probs"][chosen].exp(), values["rollout_log_probs"][chosen].exp()
        assert row["count"] == int(chosen.sum()) and row["token"] == f"<{row['token_id']}>"
        assert row["share"] == pytest.approx(int(chosen.sum()) / int(of_mask.sum()))
        expected = {"mu": mu, "pi": pi, "entropy": values["entropy"][chosen], "tv": (pi - mu).abs()}
        for name, of_tokens in expected.items():
            assert row[f"mean_{name}"] == pytest.approx(float(of_tokens.mean()), rel=1e-6)
    ranks = [(row["preset"], row["sign"], -row["count"], row["token_id"]) for row in rows]
    assert ranks == sorted(ranks)


def test_ranks_add_up() -> None:
    values = _tokens(1)
    parts = [
        {name: value[part] for name, value in values.items()} for part in (slice(0, 150), slice(150, None))
    ]
    states = [pickle.loads(pickle.dumps(_counted(part).state())) for part in parts]
    merged, whole = _rows(ClippedTokens().merge(states)), _rows(_counted(values))
    assert len(merged) == len(whole)
    for found, expected in zip(merged, whole, strict=True):
        assert found == pytest.approx(expected)


def test_only_the_most_frequent_are_listed() -> None:
    rows = _rows(_counted(_tokens(2)), top=2)
    assert len(rows) == 8 and _rows(ClippedTokens()) == []
    assert rows[0]["count"] >= rows[1]["count"]
