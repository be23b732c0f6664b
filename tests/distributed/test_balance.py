"""Samples that move between processes: each trained on once, in equal shares, to the same gradients."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import SampleGroup, TrainBatch
from tests.support.ranks import run_ranks
from tests.support.tiny import gradients_of, random_groups, write_model

UNEVEN = (120, 3, 90, 1, 2, 64, 5, 1, 100, 2, 2, 7)  # prompts of even number have the long responses
TOPK = 4
MAX_UNNEEDED_BYTES = 4096


def uneven_groups(num_groups: int) -> list[SampleGroup]:
    """Groups of two, the first of every three long: dealt out by turns, two ranks get very uneven shares."""
    from megatron_dppo.data.batches.gradient_steps import with_advantages

    groups = random_groups(num_groups, samples_per_group=2, topk=TOPK, response_lengths=UNEVEN)
    return with_advantages(groups, normalize_std=False)


def settings(model: str, num_prompts: int, **parallel: int) -> Config:
    return Config.model_validate(
        {
            "model": {"load": model, "dtype": "float32"},
            "parallel": {"max_tokens_per_microbatch": 150} | parallel,
            "rollout": {
                "prompts_per_rollout": num_prompts,
                "num_topk_log_probs": TOPK,
                "routing_replay": "replay",
            },
            "algorithm": {
                "preset": "dppo_topk_tv",
                "top_k": TOPK,
                "delta": 0.9,
                "aggregation": "seq_mean_token_mean",
                "minibatches_per_rollout": 4,
            },
            "optimizer": {"distributed": False},
        }
    )


def live_bytes() -> int:
    """Bytes of all tensors that this process holds, however many show the same memory."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor
    }
    return sum(storages.values())


def roll_out_and_batch(runtime: Runtime, group_of_rank: tuple[int, ...], num_prompts: int) -> dict[str, Any]:
    """One rank's gradient steps on a rollout that all ranks deal out by turns."""
    from megatron_dppo.data.batches.batch_file import bytes_of
    from megatron_dppo.data.batches.exchange import DataParallel
    from megatron_dppo.data.batches.gradient_steps import gradient_steps
    from megatron_dppo.types import ModelRouting

    before, config = live_bytes(), settings("", num_prompts)
    own = uneven_groups(num_prompts)[runtime.rank :: runtime.world_size]
    num_sampled = sum(sample.tokens.numel() for group in own for sample in group.samples)
    routing = ModelRouting((0, 1, 2), num_experts=8, top_k=2)
    steps, report = gradient_steps(
        own, 0, config, DataParallel(group_of_rank, runtime), routing=routing, shares_prefixes=False
    )
    needed, deadline = before + sum(map(bytes_of, steps)), time.monotonic() + 300
    # gloo's thread acknowledges a broadcast before it frees the buffer that it sent
    while (unneeded := live_bytes() - needed) > MAX_UNNEEDED_BYTES and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"steps": steps, "report": report, "num_sampled": num_sampled, "unneeded": unneeded}


def bytes_of_routes_and_topk(num_tokens: int) -> int:
    """Of so many packed tokens: three layers of two experts, and top-K ids and log-probs."""
    return num_tokens * (3 * 2 + TOPK * (4 + 4))


def bytes_held(result: dict[str, Any]) -> int:
    """Of routes and top-K in one rank's micro-batches, placeholders included."""
    from megatron_dppo.data.batches import memory

    return sum(memory.bytes_of_routes_and_topk(m) for step in result["steps"] for m in step.microbatches)


def batch_all(runtime: Runtime, layouts: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> dict[Any, Any]:
    """Every layout with every number of prompts, in one spawn."""
    return {(groups, n): roll_out_and_batch(runtime, groups, n) for groups in layouts for n in sizes}


def check_shares(ranks: list[dict[Any, Any]], group_of_rank: tuple[int, ...], num_prompts: int) -> float:
    """Each sample in one group, its ranks alike, none above its share; the largest fraction of bytes held."""
    from tests.support.samples import assert_same

    results = [of_rank[group_of_rank, num_prompts] for of_rank in ranks]
    num_groups = max(group_of_rank) + 1
    firsts = [results[group_of_rank.index(group)] for group in range(num_groups)]
    for result, group in zip(results, group_of_rank, strict=True):
        assert_same(result["steps"], firsts[group]["steps"])
        counts = [(step.num_loss_tokens, step.num_samples, len(step.microbatches)) for step in result["steps"]]
        assert counts[0][1] == num_prompts * 2 // 4
        assert counts == [(s.num_loss_tokens, s.num_samples, len(s.microbatches)) for s in results[0]["steps"]]
        assert result["unneeded"] <= MAX_UNNEEDED_BYTES, "what was sent away, or packed, is freed"
    sampled = [sample.tokens.tolist() for group in uneven_groups(num_prompts) for sample in group.samples]
    trained = [tokens for first in firsts for step in first["steps"] for tokens in sequences(step)]
    assert sorted(tokens for tokens in trained if tokens != [0, 0]) == sorted(sampled), "each sample once"
    total, largest = (bytes_of_routes_and_topk(n) for n in (sum(map(len, sampled)), max(map(len, sampled))))
    for result in results:
        fillers = bytes_of_routes_and_topk(result["report"].num_padding_tokens)
        assert bytes_held(result) - fillers <= total / num_groups + largest
        sampled_here = bytes_of_routes_and_topk(result["num_sampled"])
        on_its_way = total / num_groups / 4 + largest  # one mini-batch of four
        assert result["report"].max_bytes - fillers <= max(sampled_here, total / num_groups) + 2 * on_its_way
    return max(map(bytes_held, results)) / total


def sequences(step: TrainBatch) -> list[list[int]]:
    """The tokens of each packed sequence."""
    return [
        tokens.tolist()
        for m in step.microbatches
        for tokens in m.tokens.tensor_split(m.cu_seqlens[1:-1].long())
    ]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return run_ranks(batch_all, 2, tmp_path_factory.mktemp("two"), [(0, 1), (0, 0)], [12, 96])


@pytest.mark.parametrize("num_prompts", [12, 96])
@pytest.mark.parametrize("group_of_rank", [(0, 1), (0, 0)], ids=str)
def test_samples_are_balanced_over_two_processes(
    two_ranks: list[dict[Any, Any]], group_of_rank: tuple[int, ...], num_prompts: int
) -> None:
    check_shares(two_ranks, group_of_rank, num_prompts)
    report = two_ranks[0][group_of_rank, num_prompts]["report"]
    assert (report.num_moved > 0) == (group_of_rank == (0, 1))


def test_bytes_per_process_grow_as_the_batch_and_no_faster(two_ranks: list[dict[Any, Any]]) -> None:
    """What one process holds of all routes and top-K is the same fraction of 12 prompts and of 96."""
    small, large = (check_shares(two_ranks, (0, 1), n) for n in (12, 96))
    held = [[bytes_held(rank[(0, 1), n]) for rank in two_ranks] for n in (12, 96)]
    growth = [after / before for before, after in zip(*held, strict=True)]
    sampled = [rank[(0, 1), 96]["num_sampled"] for rank in two_ranks]
    print(f"held {held}, growth {growth}, fractions {small:.4f} {large:.4f}, tokens sampled {sampled}")
    assert max(sampled) > 1.5 * min(sampled), "there is something to share out"
    assert large <= 0.5 * 1.05
    assert growth == pytest.approx([8, 8], rel=0.1)


@pytest.mark.slow
def test_samples_are_balanced_over_four_processes(tmp_path: Path) -> None:
    layouts = [(0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 2, 3)]
    ranks = run_ranks(batch_all, 4, tmp_path, layouts, [24])
    fractions = [check_shares(ranks, groups, 24) for groups in layouts]
    assert fractions[2] < 0.6 * fractions[0]


def gradients(runtime: Runtime, model: str) -> dict[str, Any]:
    """Gradients of one mini-batch, sampled and packed in several ways, on this many processes."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches

    config = settings(model, 6, expert=runtime.world_size)
    actor = Actor(config, runtime)
    results: dict[str, Any] = {}
    for name, max_tokens, order in (("plain", 150, 1), ("other packing, other owners", 400, -1)):
        own = uneven_groups(6)[::order][runtime.rank :: runtime.world_size]
        samples = [sample for group in own for sample in group.samples][::order]
        shape = BatchShape("seq_mean_token_mean", 120, max_tokens, topk_columns=TOPK, routing=actor.routing)
        (batch,), report = train_batches([samples], shape, actor.data_parallel)
        step = actor.accumulate_gradients(batch, is_first=True)
        assert not step.faults
        results[name] = {
            "gradients": gradients_of(actor),
            "num_microbatches": len(batch.microbatches),
            "report": report,
        }
    return results


def test_gradients_depend_neither_on_owner_packing_order_nor_number_of_processes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=256)
    one, two = (run_ranks(gradients, n, tmp_path, str(model))[0] for n in (1, 2))
    reference = one["plain"]["gradients"]
    assert all(float(gradient.norm()) > 0 for gradient in reference.values())
    assert len({results[name]["num_microbatches"] for results in (one, two) for name in results}) > 2
    assert two["plain"]["report"].num_moved > 0
    worst = 0.0
    for results in (one, two):
        for name, result in results.items():
            assert result["gradients"].keys() == reference.keys()
            for key, gradient in result["gradients"].items():
                error = float((gradient - reference[key]).norm() / reference[key].norm())
                worst = max(worst, error)
                assert error <= 1e-5, (name, key, error)
    print(f"largest relative error of a gradient: {worst:.2e}")
