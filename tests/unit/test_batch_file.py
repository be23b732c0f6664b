"""Gradient steps there and back: the same bits, whatever they carry; torn files are refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.data.batches.batch_file import bytes_of, read_batches, write_batches
from megatron_dppo.data.batches.packing import pack, placeholder
from megatron_dppo.errors import DataError
from megatron_dppo.run.recovery import MAX_FOLDERS, write_bad_step
from megatron_dppo.types import Microbatch, TrainBatch
from tests.support.samples import ROUTING, assert_same, make_sample


def microbatches() -> list[Microbatch]:
    samples = [make_sample(list(range(4 + n)), 2, reward=float(n)) for n in range(4)]
    weighted = [replace(s, token_weights=torch.full((s.response_length,), 0.5)) for s in samples]
    return [pack(weighted[:1]), pack(weighted[1:])]


def steps() -> tuple[TrainBatch, ...]:
    packed = microbatches()
    old = [replace(m, old_log_probs=torch.full((m.tokens.numel(),), float("nan"))) for m in packed]
    plain = replace(packed[0], topk=None, routed_experts=None, weight_versions=None)
    return (
        TrainBatch((*packed, placeholder(2, ROUTING)), 9, 4),
        TrainBatch(tuple(old), 3, 2),
        TrainBatch((plain,), 1, 1),
    )


def test_steps_come_back_bit_for_bit(tmp_path: Path) -> None:
    write_batches(tmp_path / "steps.safetensors", steps())
    assert_same(read_batches(tmp_path / "steps.safetensors"), steps())


def test_no_step_is_a_file_too(tmp_path: Path) -> None:
    write_batches(tmp_path / "none.safetensors", ())
    assert read_batches(tmp_path / "none.safetensors") == ()


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    write_batches(tmp_path / "steps.safetensors", steps())
    total = sum(bytes_of(step) for step in steps())
    size = (tmp_path / "steps.safetensors").stat().st_size
    assert 0.2 * size < total < size


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_a_torn_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "steps.safetensors"
    write_batches(file, steps())
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match="torn or of another kind"):
        read_batches(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.safetensors"):
        read_batches(tmp_path / "nowhere.safetensors")


def test_batches_of_the_first_bad_steps_are_kept_and_no_others(tmp_path: Path) -> None:
    """A step that is bad again after a resume replaces its own batches, though no further step has room."""
    runtime: Any = SimpleNamespace(rank=3, on_main=lambda work: work())
    batches = [steps()[number % 3] for number in range(MAX_FOLDERS + 3)]
    for number, batch in [*enumerate(batches), (2, batches[5])]:
        write_bad_step(tmp_path, 10 + number, batch, [f"inf in {number}", "NaN"], runtime)
    kept = {f"step_{10 + number:08d}": batches[number] for number in range(MAX_FOLDERS)}
    kept["step_00000012"] = batches[5]
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    for name, batch in kept.items():
        (found,) = read_batches(tmp_path / name / "rank_00003.safetensors")
        assert_same(found, batch)
        number = int(name[-8:]) - 10
        assert json.loads((tmp_path / name / "faults.json").read_text()) == [f"inf in {number}", "NaN"]
