"""In-process sync: what was sent is what arrived, on every rank."""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_dppo.errors import WeightSyncError
from megatron_dppo.rollout.checksum import WeightChecksum
from megatron_dppo.runtime.gpu_ledger import GpuLedger
from megatron_dppo.weight_sync.in_process import InProcessSync

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


class Receiver:
    """Stands for an engine, so that it can be made to err; the real one has tests of its own."""

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


def test_a_checksum_depends_on_each_part_of_a_tensor() -> None:
    def of(name: str, tensor: Tensor) -> str:
        checksum = WeightChecksum()
        checksum.update(name, tensor)
        return checksum.hexdigest()

    zeros = torch.zeros(2, 3)
    others = [of("b", zeros), of("a", zeros.T), of("a", zeros.int()), of("a", zeros + 1e-9), of("a", zeros[:1])]
    assert len({of("a", zeros), *others}) == 6
    assert of("a", torch.arange(6.0).reshape(2, 3).T) == of("a", torch.arange(6.0).reshape(2, 3).T.contiguous())


def test_each_tensor_arrives_once_with_the_version() -> None:
    receiver = Receiver()
    pushed = sync(receiver, Ranks())
    pushed.push(7)
    assert receiver.names == ["a", "b"]
    assert receiver.version == 7
    assert len(pushed.received) == 32


def test_a_receiver_that_missed_a_tensor_is_found_out() -> None:
    with pytest.raises(WeightSyncError, match="version 3"):
        sync(Receiver(skip="b"), Ranks()).push(3)


def test_a_receiver_that_stopped_reading_is_found_out() -> None:
    with pytest.raises(WeightSyncError, match="version 3"):
        sync(LazyReceiver(), Ranks()).push(3)


def test_ranks_that_drifted_apart_are_found_out() -> None:
    with pytest.raises(WeightSyncError, match="different weights"):
        sync(Receiver(), Ranks("0" * 32)).push(3)


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
