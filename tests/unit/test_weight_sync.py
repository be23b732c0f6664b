"""In-process sync: what was sent is what arrived, on every rank."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.architectures.registry import read_hf_config
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.engines.embedded.engine import WeightChecksum
from megatron_dppo.engines.sglang.model import has_own_output
from megatron_dppo.engines.weight_sync.factory import with_served_names
from megatron_dppo.engines.weight_sync.fleet import Member
from megatron_dppo.engines.weight_sync.syncs import InProcessSync, SglangSync
from megatron_dppo.errors import WeightSyncError
from megatron_dppo.runtime.gpu_ledger import GpuLedger
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


def test_receiver_that_missed_a_tensor_is_detected() -> None:
    with pytest.raises(WeightSyncError, match="version 3"):
        sync(Receiver(skip="b"), Ranks()).push(3)


def test_receiver_that_stopped_reading_is_detected() -> None:
    with pytest.raises(WeightSyncError, match="version 3"):
        sync(LazyReceiver(), Ranks()).push(3)


def test_ranks_that_drifted_apart_are_detected() -> None:
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


class Pushed:
    """Stands for the parts of a push to one server, and records when the probe is used."""

    needs_begin = takes_turns = False
    members, failures = ("server",), {}

    def __init__(self) -> None:
        self.is_main, self.gpu_ledger = True, GpuLedger(lambda: None, lambda: None)
        self.expected, self.probed, self.num_pushes = list[int](), list[int](), 0

    def expect(self) -> None:
        self.expected.append(self.num_pushes)

    failures: ClassVar[dict[str, str]] = {}

    def run(self, members: object) -> dict[str, float]:
        self.probed.append(self.num_pushes)
        return {"sync/probe_abs_diff_max": 0.5}

    def fleet(self, without: object) -> tuple["Pushed", dict[str, str]]:
        return self, {}

    def all_gather(self, value: object) -> list[object]:
        return [value]

    def on_main(self, action: Callable[[], object]) -> object:
        return action()

    def ignore(self, *arguments: object, **options: object) -> None: ...

    barrier = send = admit = tell = agree = resume = close = ignore


@pytest.mark.parametrize(("every", "probed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])])
def test_the_probe_compares_after_the_first_push_and_each_period(every: int, probed: list[int]) -> None:
    """The trainer's log-probs are computed before the pushes that are compared, and no others."""
    stand_in = Pushed()
    part = cast(Any, stand_in)
    stand_in.members = cast(Any, (Member("http://127.0.0.1:1", 1, 1, "0.5.23"),))
    tried: list[str] = []
    push = SglangSync(
        part,
        part,
        part,
        part,
        probe=part,
        probe_every=every,
        require_sampling=lambda urls: tried.extend(urls) or {},
    )
    has_metrics: list[int] = []
    for version in range(5):
        push.prepare_push()
        metrics = push.push(version)
        has_metrics += [version] if "sync/probe_abs_diff_max" in metrics else []
        stand_in.num_pushes += 1
    assert stand_in.expected == stand_in.probed == has_metrics == probed
    assert tried == ["http://127.0.0.1:1"], "its log-probs are tried once"


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
