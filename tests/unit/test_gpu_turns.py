"""Who holds the GPU: what the ledger refuses, and memory that leaves for the host in pieces."""

import pytest
import torch

from megatron_dppo.actor import offload, reference
from megatron_dppo.actor.offload import Residence
from megatron_dppo.actor.reference import HostCopy
from megatron_dppo.runtime.gpu_ledger import ENGINE_RESIDUE_BYTES, RESERVE_BYTES, GpuLedger, Holder
from megatron_dppo.runtime.process import Runtime, outside_device_bytes


def ledger(*, takes_turns: bool) -> tuple[GpuLedger, list[str]]:
    """A ledger, and the calls that it made to the allocator."""
    asked: list[str] = []
    made = GpuLedger(lambda: asked.append("give back"), lambda: None)
    made.begin(takes_turns=takes_turns)
    return made, asked


@pytest.mark.parametrize(
    ("before", "holder"),
    [
        (["trainer", "engine weights"], "engine cache"),
        (["engine weights", "engine cache"], "trainer"),
        ([], "engine cache"),
    ],
)
def test_holders_that_exclude_each_other_are_refused(before: list[Holder], holder: Holder) -> None:
    made, _ = ledger(takes_turns=True)
    for each in before:
        made.acquire(each)
    with pytest.raises(AssertionError):
        made.acquire(holder)


def test_engine_on_a_separate_gpu_is_recorded_without_freeing_memory() -> None:
    made, asked = ledger(takes_turns=False)
    for holder in ("trainer", "engine weights", "engine cache"):
        made.acquire(holder)
    assert [entry.holder for entry in made.entries] == ["trainer", "engine weights", "engine cache"]
    assert asked == []


def test_offload_frees_the_memory_once() -> None:
    made, asked = ledger(takes_turns=True)
    made.acquire("trainer")
    made.leaves("trainer")
    made.leaves("trainer")
    assert asked == ["give back"]
    assert [entry.is_there for entry in made.entries] == [True, False]


def test_residual_memory_is_measured_between_turns_and_an_excess_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assumed = RESERVE_BYTES + ENGINE_RESIDUE_BYTES
    sizes = iter([assumed - 8, assumed - 5, assumed + 7, assumed + 3])
    made = GpuLedger(lambda: None, lambda: 11, lambda: next(sizes))
    made.begin(takes_turns=True)
    found: list[int | None] = [made.outside_bytes]
    for _ in range(2):
        made.acquire("trainer")
        made.leaves("trainer")
        found.append(made.outside_bytes)
        made.acquire("engine weights")
        made.acquire("engine cache")
        made.leaves("engine cache")
        made.leaves("engine weights")
        found.append(made.outside_bytes)
    assert next(sizes, None) is None
    assert found == [None, assumed - 8, assumed - 5, assumed + 7, assumed + 7]
    (said,) = caplog.messages
    assert "found 7.0 GiB" in said and "sglang.cuda_graph_max_bs_decode" in said and "--measured" in said
    made.begin(takes_turns=False)
    made.acquire("trainer")
    made.leaves("trainer")
    assert made.outside_bytes is None


def test_the_device_s_bytes_outside_are_those_of_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outside_device_bytes() is None
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (30, 100))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 23)
    assert outside_device_bytes() == Runtime(torch.device("cpu"), 0, 1).gpu_ledger._find_outside() == 47


def test_memory_leaves_in_pieces_and_is_read_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of one buffer, of which some lie across two pieces of the host's memory."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 64)
    buffer = torch.arange(75, dtype=torch.float32)
    parts = [buffer[:10], buffer[10:40].view(5, 6), buffer[40:75]]
    before = [part.clone() for part in parts]
    dropped = torch.ones(7)
    residence = Residence(torch.device("cpu"))
    assert residence.read(parts[1]) is parts[1]
    for _ in range(2):
        residence.leave(parts, dropped=[dropped])
        assert buffer.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
        assert residence.num_bytes_away == 82 * 4
        assert all(
            torch.equal(residence.read(part), values) for part, values in zip(parts, before, strict=True)
        )
        residence.reload()
        assert all(torch.equal(part, values) for part, values in zip(parts, before, strict=True))
        assert not dropped.any()
        dropped += 1


def test_a_reference_changes_places_with_the_policy_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of the host's memory that end within tensors; NaN and -0 are bits like others."""
    monkeypatch.setattr(reference, "PIECE_BYTES", 50)
    policy = [torch.arange(30.0).view(5, 6), torch.full((17,), torch.nan), torch.tensor([-0.0]).bfloat16()]
    kept, first = HostCopy(policy), [tensor.clone() for tensor in policy]
    assert kept.num_bytes == (30 + 17) * 4 + 2
    for tensor in policy:
        tensor.add_(1)
    moved = [tensor.clone() for tensor in policy]
    for expected in (first, moved, first):
        kept.exchange()
        for tensor, values in zip(policy, expected, strict=True):
            assert torch.equal(tensor.view(torch.uint8), values.view(torch.uint8))
