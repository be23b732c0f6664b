"""Every family against Hugging Face on one GPU, shared prefixes, and the kernels of the delta rule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.models.delta_rule import Chunks, KernelSequences, kernel_fault
from megatron_dppo.runtime.process import Runtime
from tests.distributed.test_families import compare
from tests.distributed.test_shared_prefixes import CASES, measure
from tests.support.ranks import run_ranks
from tests.support.roundoff import relative
from tests.support.tiny_families import write_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LIMIT = 1e-4  # float32 sums in another order
SHARED = {"float32": 1e-5, "bfloat16": 3e-2}  # of gradients; an H200 had 2.7e-6 and 8.8e-3
LIVE_ROUTES = "routes, measured", "routes of the anchor"  # rounding turns them into other experts
RULES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def compare_families(runtime: Runtime, folder: str) -> dict[str, dict[str, Any]]:
    return {name: compare(runtime, Path(folder) / name, Path(folder) / name) for name in FAMILIES}


def share_prefixes(runtime: Runtime, folder: str, dtype: str) -> dict[str, list[float]]:
    found = dict[str, list[float]]()
    for case, (family, tables) in CASES.items():
        if dtype == "bfloat16" and any(rule.is_expert for rule in FAMILIES[family].rules):
            if case in LIVE_ROUTES:
                continue
            tables = {"rollout": {"routing_replay": "replay"}} | tables
            if "lora" in tables:
                tables |= {"lora": {"rank": 8, "alpha": 8}}  # grouped products need rows of 16 bytes
        one = measure(runtime, Path(folder) / family, tables, dtype)
        shared, alone = (
            [*one[is_shared]["gradients"], one[is_shared]["log_probs"]] for is_shared in (True, False)
        )
        found[case] = [relative(x.float(), y.float()) for x, y in zip(shared, alone, strict=True)]
    return found


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(folder / name, name)
    return folder


def test_logits_loss_and_gradients_equal_hugging_face(families: Path, tmp_path: Path) -> None:
    measured = run_ranks(compare_families, 1, tmp_path, str(families))[0]
    for name, one in measured.items():
        errors = {"logits": one["logit_error"], "loss": one["loss_error"], **one["errors"]}
        worst = max(errors, key=lambda each: errors[each].value / max(LIMIT, errors[each].limit))
        print(name, worst, errors[worst])
        assert errors[worst].value <= max(LIMIT, errors[worst].limit), (name, worst)


@pytest.mark.parametrize("dtype", SHARED)
def test_shared_prefixes_train_like_samples_alone(families: Path, tmp_path: Path, dtype: str) -> None:
    measured = run_ranks(share_prefixes, 1, tmp_path, str(families), dtype)[0]
    worst = {case: max(errors) for case, errors in measured.items()}
    print(dtype, {case: f"{error:.1e}" for case, error in worst.items()})
    assert max(worst.values()) <= SHARED[dtype], worst


@pytest.mark.parametrize("dtype", RULES)
@pytest.mark.parametrize("form", [Chunks, KernelSequences])
def test_the_delta_rule_equals_its_float64_form(form: type[Chunks], dtype: torch.dtype) -> None:
    if form is KernelSequences and (fault := kernel_fault("cuda", dtype, 4, 128, 128)):
        pytest.skip(f"flash-linear-attention: {fault}")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 64, 200, 3, 65, 129, 700])
    cu_seqlens, num_tokens, heads = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]), int(lengths.sum()), 4
    query, key, value, out = (torch.randn(num_tokens, heads, 128, generator=generator) for _ in range(4))
    decay = -torch.rand(num_tokens, heads, generator=generator)
    rate = torch.rand(num_tokens, heads, generator=generator)
    inputs = [x.cuda().to(dtype) for x in (query, key, value)] + [decay.cuda(), rate.cuda().to(dtype)]
    names = ("output", "query", "key", "value", "decay", "rate")
    found = _results(form.of(cu_seqlens, 4), inputs, out)
    exact = _results(Chunks.of(cu_seqlens, 4), [x.double() for x in inputs], out)
    errors = {name: relative(x.double(), y) for name, x, y in zip(names, found, exact, strict=True)}
    print(form.__name__, dtype, {name: f"{error:.1e}" for name, error in errors.items()})
    assert max(errors.values()) <= RULES[dtype], errors


def _results(chunks: Chunks, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    from megatron_dppo.actor.forward import to_device

    leaves = [x.detach().requires_grad_() for x in inputs]
    output = to_device(chunks, torch.device("cuda")).rule(*leaves)
    return [output, *torch.autograd.grad(output, leaves, weights.to(output))]
