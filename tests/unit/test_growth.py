"""Rows that grow at their end equal torch.cat, and their memory is bounded by the last turn's."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dppo.agents.tree import Node, Said, sharing_rows
from megatron_dppo.engines.base import Request, join_parts, response_alone, shortened, with_observation
from megatron_dppo.engines.growth import TokenIds, cut, joined
from megatron_dppo.types import RolloutTopK, RoutedExperts, Sample, WeightVersionSpan
from tests.support.samples import assert_same

NUM_LAYERS, NUM_COLUMNS, NUM_PROMPT_TOKENS = 3, 5, 7


@pytest.mark.parametrize("seed", range(4))
def test_no_result_changes_whatever_is_appended_to_whichever(seed: int) -> None:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    found, expected = [torch.zeros(0, 2)], [torch.zeros(0, 2)]
    for _ in range(300):
        number = chance.choice([-1, -1, -1, chance.randrange(len(found))])
        tail = torch.randn(chance.randrange(5), 2, generator=generator)
        found.append(joined(found[number], tail))
        expected.append(torch.cat([expected[number], tail]))
    assert_same(found, expected)


def test_only_rows_after_a_cut_are_overwritten() -> None:
    earlier = joined(torch.arange(4), torch.arange(4, 6))
    rows = joined(earlier, torch.arange(6, 9))
    after = joined(cut(rows, 7), torch.tensor([70, 80]))
    assert (earlier.tolist(), after.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 70, 80])
    other = joined(joined(earlier, torch.tensor([9])), torch.tensor([10]))
    assert other.tolist() == [0, 1, 2, 3, 4, 5, 9, 10] and after[6] == 6


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.uint8), torch.ones(1, 3, dtype=torch.int16)),
    ],
)
def test_rows_of_two_types_are_joined_as_torch_does(head: Tensor, tail: Tensor) -> None:
    torch.testing.assert_close(joined(head, tail), torch.cat([head, tail]))


def test_token_ids_are_those_of_the_prompt_and_the_rows() -> None:
    ids = TokenIds((5, 3), torch.tensor([8, 0, 2]))
    assert (len(ids), list(ids), ids[2], ids[-1], ids[1:3]) == (5, [5, 3, 8, 0, 2], 8, 2, [3, 8])
    assert list(TokenIds((5, 3))) == [5, 3] and 8 in ids and 9 not in ids


def part(num_tokens: int, num_rows: int, version: int, generator: torch.Generator) -> Sample:
    """Sampled tokens of random numbers, with Top-K and routes."""

    def drawn(*shape: int) -> Tensor:
        return torch.randint(0, 100, shape, generator=generator)

    columns = -torch.rand(num_tokens, NUM_COLUMNS, generator=generator)
    return response_alone(
        "0",
        drawn(num_tokens),
        -torch.rand(num_tokens, generator=generator),
        "stop",
        RolloutTopK(drawn(num_tokens, NUM_COLUMNS).int(), columns),
        RoutedExperts(drawn(num_rows, NUM_LAYERS, 2).to(torch.uint8), (0, 1, 2), 128),
        (WeightVersionSpan(0, num_tokens, version),),
    )


def copied(completion: Sample) -> Sample:
    """The same numbers in memory of their own."""
    assert completion.topk is not None and completion.routed_experts is not None
    return replace(
        completion,
        tokens=completion.tokens.clone(),
        rollout_log_probs=completion.log_probs.clone(),
        topk=RolloutTopK(completion.topk.ids.clone(), completion.topk.log_probs.clone()),
        routed_experts=replace(completion.routed_experts, indices=completion.routed_experts.indices.clone()),
        loss_mask=completion.loss_mask.clone(),
    )


def rows_of(completion: Sample) -> list[Tensor]:
    assert completion.topk is not None and completion.routed_experts is not None
    topk, indices = completion.topk, completion.routed_experts.indices
    return [completion.tokens, completion.log_probs, topk.ids, topk.log_probs, indices, completion.loss_mask]


def played(
    num_calls: int, forks: tuple[int, ...] = (), *, has_copies: bool = True
) -> tuple[list[Node], list[Sample]]:
    """Nodes of an episode, and copies. Each continues the one before, or at a fork an early one."""
    generator, nodes, copies = torch.Generator().manual_seed(num_calls), list[Node](), list[Sample]()
    for number in range(num_calls):
        parent = nodes[number // 3 if number in forks else -1] if nodes else None
        num_tokens, num_new = 3 + number % 5, 2 + number % 3
        if parent is None:
            completion = part(num_tokens, NUM_PROMPT_TOKENS + num_tokens - 1, number, generator)
            start = 0
        else:
            partial = with_observation(parent.completion, torch.arange(num_new))
            start = partial.tokens.numel()
            rest = part(num_tokens + 1, num_new + num_tokens + 1, number, generator)
            completion = shortened(join_parts(partial, rest), start + num_tokens)
        node = Node(number, "continues", parent, Request("0", (), (0, 0, 0)), completion, Said(), (), "", start)
        node.share_rows()
        nodes.append(node)
        copies += [copied(completion)] if has_copies else []
    return nodes, copies


def bytes_of_nodes(nodes: Sequence[Node]) -> int:
    """Bytes of all memory that the nodes' rows are in."""
    memories = {
        rows.untyped_storage().data_ptr(): rows.untyped_storage().nbytes()
        for node in nodes
        for rows in rows_of(node.completion)
    }
    return sum(memories.values())


@pytest.mark.parametrize("forks", [(), (20,), (9, 21, 22, 37)])
def test_earlier_nodes_stay_equal_as_the_episode_continues(forks: tuple[int, ...]) -> None:
    nodes, copies = played(40, forks)
    assert_same([node.completion for node in nodes], copies)


@pytest.mark.parametrize("num_calls", [25, 50, 100, 200])
def test_an_episode_keeps_at_most_one_and_a_half_times_what_trains(num_calls: int) -> None:
    """However many calls it has: each node has its rows, and they share their memory."""
    nodes, _ = played(num_calls)
    trained = sum(rows.nbytes for rows in rows_of(nodes[-1].completion))
    assert bytes_of_nodes(nodes) <= 1.6 * trained


def test_a_completion_on_the_memory_of_a_longer_one_has_its_own_numbers() -> None:
    generator = torch.Generator().manual_seed(3)
    first = part(4, NUM_PROMPT_TOKENS + 3, 1, generator)
    longer = join_parts(with_observation(first, torch.arange(2)), part(5, 7, 2, generator))
    assert_same(sharing_rows(first, longer), first)
