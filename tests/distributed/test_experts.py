"""Our grouped experts equal Megatron's SequentialMLP: output and every gradient, experts without tokens too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.runtime.process import Runtime
from tests.support.expert_pair import expert_pair
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model

TOKENS_PER_EXPERT: dict[str, list[int]] = {
    "uneven": [5, 3, 17, 2],
    "one token each": [1, 1, 1, 1],
    "first and third without": [0, 4, 0, 3],
    "last without": [6, 2, 9, 0],
    "all on the first": [31, 0, 0, 0],
    "all on the last": [0, 0, 0, 31],
    "no token at all": [0, 0, 0, 0],
}


def compare_all(runtime: Runtime, model: str, dtype: str) -> dict[str, dict[str, float]]:
    """On one process: the relative error of the output and of each gradient, for each spread of tokens."""
    grouped, sequential = expert_pair(Path(model), 4, getattr(torch, dtype), runtime.device)
    return {name: _compare(grouped, sequential, tokens) for name, tokens in TOKENS_PER_EXPERT.items()}


def _compare(grouped: Any, sequential: Any, tokens: list[int]) -> dict[str, float]:
    found = _outcome(grouped, tokens, [grouped.fc1_weight, grouped.fc2_weight])
    weights = [
        getattr(expert, linear).weight
        for linear in ("linear_fc1", "linear_fc2")
        for expert in sequential.local_experts
    ]
    output, hidden, probs, *gradients = _outcome(sequential, tokens, weights)
    half = len(tokens)
    expected = [output, hidden, probs, torch.stack(gradients[:half]), torch.stack(gradients[half:])]
    names = ("output", "hidden", "probs", "fc1", "fc2")
    return {n: _relative(a, b) for n, a, b in zip(names, found, expected, strict=True)}


def _outcome(experts: Any, tokens: list[int], weights: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the input, the routing probabilities and the weights."""
    device, dtype = weights[0].device, weights[0].dtype
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    total, width = sum(tokens), weights[0].shape[-1]
    hidden, probs = random(total, width).requires_grad_(), random(total).float().sigmoid().requires_grad_()
    output, bias = experts(hidden, torch.tensor(tokens), probs)
    assert bias is None
    output.backward(random(total, width))
    inputs: list[Any] = [hidden, probs, *weights]
    gradients = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    assert all(gradient is not None for gradient in gradients), "overlapped reduction waits for each gradient"
    return [output.detach(), *gradients]


def _relative(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||; ||value - reference|| if the reference is zero or empty."""
    assert value.shape == reference.shape
    difference, size = (value - reference).double().norm(), reference.double().norm()
    return float(difference / size) if size > 0 else float(difference)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("experts")
    write_model(folder / "model")
    return run_ranks(compare_all, 1, folder, str(folder / "model"), "float32")[0]


@pytest.mark.parametrize("tokens", TOKENS_PER_EXPERT)
def test_grouped_experts_equal_sequential_ones(errors: dict[str, dict[str, float]], tokens: str) -> None:
    assert set(errors[tokens]) == {"output", "hidden", "probs", "fc1", "fc2"}
    for name, error in errors[tokens].items():
        assert error <= 1e-6, f"{name}: {error:.1e}"
