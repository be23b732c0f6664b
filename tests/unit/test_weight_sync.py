"""In-process sync: what was sent is what arrived, on every rank."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.architectures.registry import read_hf_config
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.engines.embedded.engine import WeightChecksum
from megatron_dppo.engines.sglang.model import has_own_output
from megatron_dppo.engines.weight_sync.factory import with_served_names
from megatron_dppo.engines.weight_sync.syncs import InProcessSync
from megatron_dppo.errors import WeightSyncError
from megatron_dppo.runtime.gpu_ledger import GpuLedger
from tests.support.pushing import record_of, run_servers, sync_to
from tests.support.sglang_stand_in import StandIn
from tests.support.tiny_families import write_family

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


class Receiver:
    """A fake engine that can be made to err; the real one has separate tests."""

    def __init__(self, skip: str = "") -> None:
        self.skip, self.names, self.version = skip, [], -1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        checksum = WeightChecksum()
        for name, tensor in weights:
            if name != self.skip:
                checksum.update(name, tensor)
                self.names.append(name)
        self.version = version
        return checksum.hexdigest()


class LazyReceiver(Receiver):
    """Stops reading after the first tensor."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        return super().load_weights([next(iter(weights))], version)


class Ranks:
    """Stands for a job of several ranks, with what the others report."""

    def __init__(self, *others: str) -> None:
        self.others = others
        self.gpu_ledger = GpuLedger(lambda: None, lambda: None)

    def all_gather(self, value: str) -> list[str]:
        return [value, *self.others]


def weights() -> Iterator[tuple[str, Tensor]]:
    yield from WEIGHTS.items()


def sync(receiver: Receiver, ranks: Ranks) -> InProcessSync:
    return InProcessSync(weights, cast(Any, receiver), cast(Any, ranks))


@pytest.mark.parametrize("tensor", [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16), torch.tensor(1.0)])
def test_a_checksum_leaves_memory_that_can_be_resized(tensor: Tensor) -> None:
    """`rollout.release_trainer` takes the memory of parameters away after a push."""
    parameter = torch.nn.Parameter(tensor.clone())
    WeightChecksum().update("a", parameter)
    assert parameter.untyped_storage().resizable()


def test_each_tensor_arrives_once_with_the_version() -> None:
    receiver = Receiver()
    pushed = sync(receiver, Ranks())
    pushed.push(7)
    assert receiver.names == ["a", "b"]
    assert receiver.version == 7
    assert len(pushed.received) == 32


@pytest.mark.parametrize(
    ("receiver", "ranks", "message"),
    [
        (Receiver(skip="b"), Ranks(), "version 3"),
        (LazyReceiver(), Ranks(), "version 3"),
        (Receiver(), Ranks("0" * 32), "different weights"),
    ],
    ids=["a tensor is missing", "it stops reading", "ranks differ"],
)
def test_a_receiver_with_other_weights_is_an_error(receiver: Receiver, ranks: Ranks, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        sync(receiver, ranks).push(3)


def test_the_checksum_sees_name_type_shape_bytes_and_order() -> None:
    def digest(*pairs: tuple[str, Tensor]) -> str:
        checksum = WeightChecksum()
        for name, tensor in pairs:
            checksum.update(name, tensor)
        return checksum.hexdigest()

    a, b = ("a", torch.zeros(4)), ("b", torch.zeros(4))
    variants = [
        digest(a, b),
        digest(b, a),
        digest(a),
        digest(a, ("b", torch.zeros(2, 2))),
        digest(a, ("b", torch.zeros(8, dtype=torch.bfloat16))),
        digest(a, ("b", torch.tensor([0.0, 0.0, 0.0, 1e-30]))),
        digest(a, ("c", torch.zeros(4))),
    ]
    assert len(set(variants)) == len(variants)
    assert digest(a, b) == digest(a, ("b", torch.zeros(4, 2)[:, 0])), "strides do not matter"


def test_the_checksum_sees_changes_anywhere_in_a_large_tensor() -> None:
    """In each block and after the last word; also signs of two values, and two blocks that swap."""

    def digest(tensor: Tensor) -> str:
        checksum = WeightChecksum()
        checksum.update("a", tensor)
        return checksum.hexdigest()

    whole = torch.arange(3 * 2**14 + 5, dtype=torch.float32)
    signs, swapped = whole.clone(), whole.clone()
    signs[[7, 9]] *= -1
    swapped[: 2**15] = whole[: 2**15].roll(2**14)
    changed = [whole.index_fill(0, torch.tensor(at), -1.0) for at in (0, 2**14, 3 * 2**14 + 4)]
    assert len({digest(tensor) for tensor in (whole, signs, swapped, -whole, *changed)}) == 7
    odd = torch.arange(9, dtype=torch.bfloat16)
    assert digest(odd[1:]) == digest(odd[1:].clone()), "a view that begins within a word"
    assert len({digest(odd), digest(odd.index_fill(0, torch.tensor(8), -1.0)), digest(odd[:-1])}) == 3


@pytest.mark.parametrize(("every", "probed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])])
def test_the_probe_compares_after_the_first_push_and_each_period(
    every: int, probed: list[int], tmp_path: Path
) -> None:
    """The trainer's log-probs are computed before the pushes that are compared, and before no others."""
    expected, compared, with_metrics, tried = list[int](), list[int](), list[int](), list[str]()

    def compare(members: object) -> dict[str, float]:
        compared.append(version)
        return {"sync/probe_abs_diff_max": 0.5}

    probe = SimpleNamespace(failures={}, expect=lambda: expected.append(version), run=compare)
    with StandIn().running() as server:
        owner = run_servers([record_of(server)], tmp_path)
        push = sync_to(owner, probe=probe, every=every, require_sampling=lambda urls: tried.extend(urls) or {})
        for version in range(5):
            push.prepare_push()
            if "sync/probe_abs_diff_max" in push.push(version):
                with_metrics.append(version)
    assert expected == compared == with_metrics == probed
    assert tried == [server.url], "its log-probs are tried once"


class Stored:
    """The tensors of a Hugging Face folder, one by one as the trainer's weight table names them."""

    pipeline_place, log_probs = (0, 1, True), None

    def __init__(self, folder: Path) -> None:
        self._weights = HFWeights(folder)

    def weights(self, **_: object) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._weights.tensor(name)) for name in sorted(self._weights.names))

    def describe_weights(self, **_: object) -> dict[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.weights()}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GptOssForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ],
)
def test_servers_get_the_tensors_of_the_published_folder(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Experts that are published in stacks travel in stacks, all others one by one."""
    write_family(tmp_path, architecture, **changes)
    expected = load_file(tmp_path / "model.safetensors")
    hf = read_hf_config(tmp_path)
    owner = with_served_names(Stored(tmp_path), hf)
    found, described = dict(owner.weights()), owner.describe_weights()
    if has_own_output(hf):
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert found.keys() == expected.keys() == described.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(described[name].shape == expected[name].shape for name in expected)
