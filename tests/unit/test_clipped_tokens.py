"""Clipped tokens: counted by the rule that masks them, on any rank, most frequent first."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.metrics.masked_tokens import ACTIVE, TOP, ClippedTokens, TokenLists
from megatron_dppo.run.history import OpenTokenLists
from megatron_dppo.runtime.files import read_jsonl
from tests.support.byte_tokenizers import qwen3_tokenizer, save

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
    keys = [(row["preset"], row["sign"], row["token_id"]) for row in rows]
    assert len(set(keys)) == len(keys)
    for preset in ("half", "most"):
        for sign, is_of_sign in (("+", values["advantages"] > 0), ("-", values["advantages"] < 0)):
            counted = sum(row["count"] for row in rows if (row["preset"], row["sign"]) == (preset, sign))
            assert counted == int((is_of_sign & values["loss_mask"] & ~values[preset]).sum()) > 0


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


def _of_ids(counts: dict[int, int], sign: int) -> ClippedTokens:
    """Masked tokens of one gradient step: ids, each so many times."""
    targets = torch.tensor([token for token, count in counts.items() for _ in range(count)])
    counted, ones = ClippedTokens(), torch.ones(len(targets))
    counted.add(
        {ACTIVE: ones == 0},
        targets=targets,
        log_probs=-0.3 * ones,
        rollout_log_probs=-0.7 * ones,
        entropy=ones,
        advantages=sign * ones,
        loss_mask=ones == 1,
    )
    return counted


@pytest.mark.parametrize("stops_after", [None, 0, 1])
def test_steps_are_merged_before_the_list_is_cut(tmp_path: Path, stops_after: int | None) -> None:
    """Token 200 is among the 50 of no step, and the first of the rollout; a stop between steps loses none."""
    steps = [_of_ids({**{60 * step + id: 3 for id in range(TOP)}, 200: 2}, +1) for step in range(3)]
    steps[1].merge([_of_ids({3: 5, 4: 1}, -1).state()])
    save(qwen3_tokenizer(), tmp_path / "model")
    lists = OpenTokenLists(tmp_path, tmp_path / "model")
    assert lists.kept == {}
    for number, clipped in enumerate(steps):
        lists.add_step(TokenLists(clipped))
        if number == stops_after:
            kept = json.loads(json.dumps(lists.kept))
            lists = OpenTokenLists(tmp_path, tmp_path / "model")
            lists.restore(kept)
    lists.write_rollout(4)
    rows: list[Any] = [row for _, row in read_jsonl(tmp_path / "clipped_tokens" / "rollout_000004.jsonl")]
    assert {(row["rollout"], row["num_steps"], row["preset"]) for row in rows} == {(4, 3, ACTIVE)}
    found = [(row["sign"], row["token_id"], row["count"]) for row in rows]
    frequent = [("+", id, 3) for step in range(3) for id in range(60 * step, 60 * step + TOP)]
    assert found == [("+", 200, 6), *frequent[: TOP - 1], ("-", 3, 5), ("-", 4, 1)]
    assert rows[0]["share"] == pytest.approx(6 / (9 * TOP + 6)) and rows[-1]["share"] == pytest.approx(1 / 6)
    lists.restore({})
    lists.write_rollout(5)
    assert [file.name for file in (tmp_path / "clipped_tokens").iterdir()] == ["rollout_000004.jsonl"]
