"""Routes of a server against transformers': only a tie of float32 scores may change them."""

import pytest
import torch

from tests.support.comparing import TIE, Choice, num_alike

SCORES = torch.tensor([[0.9, 0.5, 0.1, 0.2], [0.3, 0.8, 0.3 + TIE / 2, 0.1], [0.4, 0.4 + TIE / 2, 0.1, 0.7]])
OTHER = torch.tensor([[0.1, 0.2, 0.6, 0.7]]).expand(3, 4)


@pytest.mark.parametrize(
    ("token", "layer", "experts", "alike"),
    [
        (0, 1, [3, 2], 2),  # as chosen
        (1, 0, [1, 0], 1),  # the second and third tie: others are chosen
        (1, 0, [2, 1], None),  # the same experts, and no tie between the two
        (0, 0, [0, 3], None),
    ],
)
def test_a_tie_ends_what_is_compared_and_any_other_difference_fails(
    token: int, layer: int, experts: list[int], alike: int | None
) -> None:
    choices = [Choice(scores, scores.topk(2).indices) for scores in (SCORES, OTHER)]
    routes = torch.stack([choice.experts for choice in choices], dim=1)[:-1]
    routes[token, layer] = torch.tensor(experts)
    if alike is None:
        with pytest.raises(AssertionError):
            num_alike(routes, choices)
    else:
        assert num_alike(routes, choices) == alike


def test_tied_experts_may_come_in_either_order() -> None:
    scores = SCORES[2:].expand(4, 4)[:, [0, 1, 2]]
    choices = [Choice(scores, scores.topk(2).indices)]
    assert num_alike(choices[0].experts.flip(-1)[:-1, None], choices) == 3
