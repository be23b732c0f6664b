"""Variants evaluated on kept mini-batches, and their results."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms import PolicyLossInputs, TopKLogProbs, policy_loss, preset
from megatron_dppo.analysis.what_if.answer import _concatenate, learning_lengths, tokens_of
from megatron_dppo.analysis.what_if.measures import PolicyTokens, evaluate_variants
from megatron_dppo.analysis.what_if.question import (
    Variant,
    inputs_lacking,
    parse_sweeps,
    question_of,
    variants,
)
from megatron_dppo.data.batches.batch_file import group_files, kept_rollouts
from megatron_dppo.errors import ConfigError, DataError
from megatron_dppo.metrics.engine_comparison import Routes
from megatron_dppo.types import Microbatch, RolloutTopK
from tests.support.refusals import refused

BASE = Variant("dppo_topk_tv", {"top_k": 4})


def tokens(num: int = 400) -> PolicyLossInputs:
    """Random tokens of a policy that has moved."""
    generator = torch.Generator().manual_seed(0)
    mu = torch.log_softmax(torch.randn(num, 12, generator=generator) * 2, -1)
    pi = torch.log_softmax(mu + torch.randn(num, 12, generator=generator), -1)
    ids = mu.topk(4).indices
    targets = torch.distributions.Categorical(logits=mu).sample()
    pick = targets[:, None]
    return PolicyLossInputs(
        log_probs=pi.gather(1, pick)[:, 0],
        rollout_log_probs=mu.gather(1, pick)[:, 0],
        advantages=torch.randn(num, generator=generator),
        targets=targets,
        topk=TopKLogProbs(ids.int(), mu.gather(1, ids), pi.gather(1, ids)),
        response_lengths=torch.tensor([num - 130, 0, 100, 30]),
    )


def of_two_rollouts(inputs: PolicyLossInputs) -> PolicyTokens:
    """The tokens split over two rollouts, with made-up norms of scores."""
    num = inputs.log_probs.numel()
    norms = torch.rand(num, generator=torch.Generator().manual_seed(1)) + 0.1
    return PolicyTokens(inputs, norms, rollouts=torch.arange(num) // (num // 2))


def test_each_variant_masks_what_policy_loss_masks() -> None:
    names = ["grpo", "dppo_binary_kl", "dppo_topk_tv"]
    swept = variants(BASE, names, {"delta": [0.05, 0.3], "top_k": [2]})
    asked = [*swept, Variant("gspo"), Variant("drpo")]
    assert [variant.name for variant in asked] == [
        "dppo_topk_tv top_k=4",
        "grpo",
        "dppo_binary_kl delta=0.05",
        "dppo_binary_kl delta=0.3",
        "dppo_topk_tv delta=0.05 top_k=2",
        "dppo_topk_tv delta=0.3 top_k=2",
        "gspo",
        "drpo",
    ]
    inputs = tokens()
    rows, _ = evaluate_variants(asked, {"live": of_two_rollouts(inputs)})
    own = policy_loss(preset("dppo_topk_tv", top_k=4), inputs).mask
    for variant, row in zip(asked, rows, strict=True):
        out = policy_loss(variant.objective, inputs)
        negative = inputs.advantages < 0
        assert row["masked_fraction_negative"] == pytest.approx(float((~out.mask)[negative].double().mean()))
        assert row["agreement"] == pytest.approx(float((out.mask == own).double().mean()))
        mass = (out.ratio * inputs.advantages.abs()).double()
        kept = mass[out.mask].sum() / mass.sum()
        assert row["dropped_mass_fraction"] == pytest.approx(float(1 - kept), abs=1e-6)
    assert all(row["masked_fraction"] > 0 for row in rows[:-1])
    assert ["weight_mean" in row for row in rows] == [False] * 7 + [True]
    assert rows[-1]["weight_mean"] == pytest.approx(float(out.weight.double().mean()), rel=1e-6)


def test_responses_are_the_learning_tokens_of_each_sequence() -> None:
    tokens = torch.arange(9)
    mask = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    lengths = torch.tensor([0, 3, 5, 5, 9], dtype=torch.int32)
    zeros = torch.zeros(9)
    m = Microbatch(
        tokens=tokens,
        targets=tokens,
        position_ids=tokens,
        cu_seqlens=lengths,
        loss_mask=mask,
        advantages=zeros,
        rollout_log_probs=zeros,
        token_weights=zeros,
    )
    assert learning_lengths(m).tolist() == [2, 0, 0, 2]


def log_probs_of(seed: int, *columns: int) -> Tensor:
    """Random log-probs of twelve positions; no two numbers of two seeds are equal."""
    return -torch.rand(12, *columns, generator=torch.Generator().manual_seed(seed)) - 0.1 * seed


def microbatch(seed: int, loss_mask: list[int]) -> Microbatch:
    """A kept micro-batch with `old_log_probs` and two columns of the Top-K, every number different."""
    ids = torch.stack([torch.arange(12) + seed, torch.arange(12) + 20], dim=1)
    return Microbatch(
        tokens=torch.arange(12),
        targets=torch.arange(12) + 7,
        position_ids=torch.arange(12),
        cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32),
        loss_mask=torch.tensor(loss_mask, dtype=torch.bool),
        advantages=log_probs_of(seed) + 1,
        rollout_log_probs=log_probs_of(seed + 1),
        token_weights=-log_probs_of(seed + 2),
        old_log_probs=log_probs_of(seed + 3),
        topk=RolloutTopK(ids, log_probs_of(seed + 4, 2)),
    )


@pytest.mark.parametrize("has_before", [False, True])
def test_each_column_comes_from_its_own_policy(has_before: bool) -> None:
    """The policy from the checkpoint, mu from the rollout, and the anchor from --before or from the run.

    Two micro-batches of two rollouts; the Top-K and the norms are further columns of the forward pass.
    """
    kinds: tuple[Routes, Routes] = "live", "replayed"
    kept = [microbatch(1, [0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]), microbatch(21, [1, 1, 0, 0, 0, 1] * 2)]

    def columns_of(*seeds: int) -> list[dict[Routes, Tensor]]:
        return [{"live": log_probs_of(seed, 4), "replayed": log_probs_of(seed + 1, 4)} for seed in seeds]

    now, before = columns_of(41, 51), columns_of(61, 71)
    rows = [m.loss_mask for m in kept]

    def joined(columns: Sequence[Tensor]) -> Tensor:
        return torch.cat([values[where] for values, where in zip(columns, rows, strict=True)])

    for routes in kinds:
        old = [columns[routes] for columns in before] if has_before else None
        found = _concatenate(
            tokens_of([*zip((3, 8), kept, strict=True)], [columns[routes] for columns in now], old)
        )
        inputs, of_pi = found.inputs, joined([columns[routes] for columns in now])
        expected = {
            "log_probs": of_pi[:, 0],
            "old_log_probs": joined(
                [each[routes][:, 0] for each in before]
                if has_before
                else [m.old_log_probs for m in kept if m.old_log_probs is not None]
            ),
            "rollout_log_probs": joined([m.rollout_log_probs for m in kept]),
            "advantages": joined([m.advantages for m in kept]),
            "token_weights": joined([m.token_weights for m in kept]),
            "targets": joined([m.targets for m in kept]),
        }
        for name, values in expected.items():
            torch.testing.assert_close(getattr(inputs, name), values, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(inputs.topk.log_probs, of_pi[:, 1:3], rtol=0, atol=0)
        assert torch.equal(inputs.topk.ids, joined([m.topk.ids for m in kept if m.topk is not None]))
        assert torch.equal(found.score_norms, of_pi[:, 3])
        assert found.rollouts.tolist() == [3] * 7 + [8] * 6
        assert inputs.response_lengths.tolist() == [3, 4, 2, 4]
        (row,), _ = evaluate_variants([Variant("dppo_binary_tv_decoupled")], {routes: found})
        distance = (expected["log_probs"].double().exp() - expected["old_log_probs"].double().exp()).abs()
        assert row["divergence_p999"] == pytest.approx(np.percentile(distance.numpy(), 99.9), rel=1e-5)


def test_a_variant_that_is_the_runs_own_comes_once() -> None:
    asked = variants(BASE, [], {"delta": [0.2, 0.4]})
    assert [variant.name for variant in asked] == ["dppo_topk_tv top_k=4", "dppo_topk_tv top_k=4 delta=0.4"]


@pytest.mark.parametrize(
    ("presets", "sweeps", "message"),
    [
        (["grpo"], {"delta": [0.1]}, "found delta of grpo"),
        (["nonsense"], {}, "found 'nonsense'"),
        (["dppo_binary_tv"], {"delta": [-1.0]}, "expected a number >= 0"),
    ],
)
def test_impossible_variants_are_refused(presets: list[str], sweeps: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants(BASE, presets, sweeps)


@pytest.mark.parametrize(
    ("name", "num_columns", "has_old", "where"),
    [
        ("dppo_topk_kl", 8, False, "--sweep"),
        ("dppo_topk_kl", 20, False, None),
        ("minirl", 0, False, "--before"),
        ("minirl", 0, True, None),
    ],
)
def test_a_variant_names_the_inputs_that_it_lacks(
    name: str, num_columns: int, has_old: bool, where: str | None
) -> None:
    lacking = inputs_lacking(Variant(name), num_columns, has_old_log_probs=has_old)
    assert [problem.where for problem in lacking] == ([where] if where else [])
    assert num_columns != 8 or lacking[0].expected == "at most the 8 that were kept"


def test_sweeps_are_values_of_toml() -> None:
    assert parse_sweeps(["delta=0.1,1", "anchor=rollout,recomputed", "include_other=true,false"]) == {
        "delta": [0.1, 1],
        "anchor": ["rollout", "recomputed"],
        "include_other": [True, False],
    }
    for wrong in ("delta", "=1", "delta=1,,2"):
        with refused("--sweep", wrong):
            parse_sweeps([wrong])


def test_a_folder_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    def ask() -> None:
        question_of(tmp_path, tmp_path, world_size=1)

    with pytest.raises(ConfigError, match=r"no config\.toml"):
        ask()
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"tracking\.batches_every"):
        ask()
    of_rollout = tmp_path / "batches" / "rollout_000003"
    of_rollout.mkdir(parents=True)
    (of_rollout / "group_1_of_2.safetensors").touch()
    with pytest.raises(ConfigError, match="--checkpoint"):
        ask()
    assert kept_rollouts(tmp_path / "batches") == [3]
    for folder, found in ((tmp_path / "nowhere", "nowhere"), (tmp_path, "config.json")):
        with refused("--checkpoint", f"{folder}, ", found):
            question_of(tmp_path, tmp_path, world_size=1, checkpoint=folder)
    with pytest.raises(DataError, match=r"group_1_of_2\.safetensors; .* 4\."):
        group_files(tmp_path / "batches", 3)
