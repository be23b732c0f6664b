"""Hugging Face folders that do not hold what they say are refused when opened."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.checkpoints.hf_folder import INDEX, HFWeights, write_hf_checkpoint
from megatron_dppo.errors import ConversionError


def two_files(folder: Path, index: object = None) -> Path:
    save_file({"a": torch.zeros(2), "rotary_emb.inv_freq": torch.zeros(1)}, folder / "1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "2.safetensors")
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_a_megatron_checkpoint_is_named_as_that(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "metadata.json").write_text("{}")
    with pytest.raises(
        ConversionError, match=r"found a Megatron checkpoint; .* Run megatron-dppo convert to-hf"
    ):
        HFWeights(tmp_path)


@pytest.mark.parametrize("index", [None, {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}])
def test_tensors_are_found_with_and_without_an_index(tmp_path: Path, index: object) -> None:
    weights = HFWeights(two_files(tmp_path, index))
    assert weights.names == {"a", "b"}
    assert torch.equal(weights.tensor("b"), torch.ones(3))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "torn, or no index"),
        ([], "torn, or no index"),
        ({"weight_map": ["a"]}, "torn, or no index"),
        ({"weight_map": {"a": 1}}, "names 1 as a file"),
        ({"weight_map": {"a": "../1.safetensors"}}, "names '../1.safetensors' as a file"),
        ({"weight_map": {"a": "3.safetensors"}}, "3.safetensors.*not there"),
        ({"weight_map": {"a": "2.safetensors"}}, "1 tensors .*'a'.* not in the files"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, index: object, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        HFWeights(two_files(tmp_path, index))


def test_two_files_with_one_name_need_an_index(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(1)}, two_files(tmp_path) / "3.safetensors")
    with pytest.raises(ConversionError, match=r"2.safetensors and 3.safetensors both have 'b'"):
        HFWeights(tmp_path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    file = two_files(tmp_path) / "2.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConversionError, match="torn"):
        HFWeights(tmp_path)


def test_a_tensor_that_comes_twice_is_refused(tmp_path: Path) -> None:
    twice = [("a", torch.zeros(1)), ("a", torch.ones(1))]
    with pytest.raises(ConversionError, match="'a' came twice"):
        write_hf_checkpoint(twice, tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()
