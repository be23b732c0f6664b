"""Hugging Face folders that do not hold what they say are refused when opened."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.checkpoints.convert.output import Rounding
from megatron_dppo.checkpoints.convert.to_hf import model_card
from megatron_dppo.checkpoints.hf_folder import INDEX, HFWeights, require_one_set, write_hf_checkpoint
from megatron_dppo.checkpoints.model_files import WeightFilesError
from megatron_dppo.config.load import to_toml
from megatron_dppo.config.schema import Config
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
    with pytest.raises(ConversionError, match="megatron-dppo convert to-hf"):
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


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OLD = (
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
)


def folder_of(folder: Path, files: Iterable[str], named: Iterable[str] = ()) -> Path:
    """A file of each name, with one tensor that all sets have, and an index that names some."""
    for file in files:
        number = file.split("-")[1] if "-of-" in file else "00001"
        save_file({f"t{number}": torch.zeros(1)}, folder / file)
    if named:
        weight_map = {f"t{file.split('-')[1]}": file for file in named}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("files", "named", "words"),
    [
        ((*SHARDS, "model.safetensors"), SHARDS, "two sets of weights, model.safetensors .* and model-00001"),
        ((*SHARDS, *OLD), SHARDS, "two sets .*-of-00003.* Remove model-00001-of-00003.*, or remove model.saf"),
        ((*SHARDS, "model.safetensors"), (), "2 sets of weights and no model.safetensors.index.json"),
        (
            ("model.safetensors",),
            SHARDS,
            "2 of 2 files are not there, and model.safetensors is.* Remove model.saf",
        ),
        (SHARDS[1:], SHARDS, r"names model-00001-of-00002.safetensors: 1 of 2 files is not there; .*Download"),
        (OLD, SHARDS, "names model-00001-of-00002.*does not name; .*Remove model.safetensors.index.json if"),
        (OLD[1:], (), "without model-00001-of-00003.safetensors; expected all files of a set. Download"),
        (
            ("model.safetensors", *OLD[:1]),
            (),
            "Remove model-00001-of-00003.safetensors if model.safetensors has",
        ),
        (("model.safetensors", "adapter_model.safetensors"), (), "found adapter_model.safetensors, an adapter"),
        ((*SHARDS, "adapter_config.json"), SHARDS, "found adapter_config.json, an adapter"),
        (("pytorch_model.bin",), (), "pickled .bin files are not read"),
    ],
)
def test_two_sets_of_weights_and_incomplete_ones_are_refused_by_name(
    tmp_path: Path, files: Sequence[str], named: Sequence[str], words: str
) -> None:
    folder_of(tmp_path, files, named)
    with pytest.raises(WeightFilesError, match=words):
        HFWeights(tmp_path)
    with pytest.raises(WeightFilesError, match=words):
        require_one_set(tmp_path)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (("consolidated.safetensors",), SHARDS),  # as Mistral publishes it
        (OLD[:2], SHARDS),
        (("model.fp16.safetensors",), SHARDS),
        (("pytorch_model.bin",), SHARDS),
        (("pytorch_model-00001-of-00002.bin",), ()),
    ],
)
def test_files_that_are_not_read_are_named(tmp_path: Path, others: Sequence[str], named: Sequence[str]) -> None:
    weights = HFWeights(folder_of(tmp_path, (*SHARDS, *others), named))
    assert weights.ignored == others
    assert weights.files == [tmp_path / file for file in SHARDS]


def test_two_files_with_one_name_need_an_index(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(1)}, two_files(tmp_path) / "3.safetensors")
    with pytest.raises(ConversionError, match=r"2.safetensors and 3.safetensors both have 'b'"):
        HFWeights(tmp_path)


def test_a_rounding_is_measured_against_the_weights_and_the_base() -> None:
    base = torch.tensor([1.0, 1.0, 2.0, 0.0, 3.0])
    trained = torch.tensor([1.0, 1.001, 2.0625, 0.0, 3.0 + 2**-8])
    rounding = Rounding()
    assert rounding.cast(trained, torch.bfloat16, base).dtype == torch.bfloat16
    rounding.cast(trained, torch.bfloat16)
    assert rounding.cast(base.bfloat16(), torch.float32).dtype == torch.float32, "nothing is lost, or counted"
    loss = rounding.loss
    relative = [0.001 / 1.001, 2**-8 / (3 + 2**-8)]
    assert (loss.num_weights, loss.num_changed, loss.num_moved, loss.num_lost) == (10, 4, 3, 2)
    assert loss.relative == pytest.approx(2 * sum(relative), rel=1e-4)
    assert loss.largest == pytest.approx(max(relative), rel=1e-4)
    first, second = loss.lines(torch.bfloat16, Path("base"))
    assert first.startswith("--dtype bfloat16 changed 40.00% of 10 weights")
    assert second.startswith("of 3 weights that differ from base, 66.67% have its value again in bfloat16")


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


@pytest.mark.parametrize(
    ("is_in_checkpoint", "prompts"),
    [
        (True, "/secret/place/p.jsonl"),
        (False, ["/secret/q.jsonl", "/secret/place/p.jsonl"]),
        (True, [{"path": "/secret/place/p.jsonl", "weight": 2.0}, {"path": "/secret/q.jsonl", "weight": 1.0}]),
    ],
)
def test_a_trained_model_gets_a_card_without_paths(
    tmp_path: Path, is_in_checkpoint: bool, prompts: object
) -> None:
    tables: dict[str, Any] = {
        "model": {"load": "/secret/place/Base-1B"},
        "lora": {"rank": 32},
        "data": {"prompts": prompts, "reward": {"math": 0.75, "my:own": 0.25}},
        "algorithm": {"preset": "dppo_binary_kl", "delta_low": 0.07},
    }
    settings = to_toml(Config.model_validate(tables).model_dump(mode="json"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000013"
    checkpoint.mkdir(parents=True)
    assert model_card(checkpoint, "mine") == {}
    (tmp_path / "run" / "config.toml").write_text(settings)
    state = {"state": {"rollout": 7, "step": 13}, "config": settings if is_in_checkpoint else ""}
    (checkpoint / "state.json").write_text(json.dumps(state))
    card = model_card(checkpoint, "mine")["README.md"]
    assert card.startswith("---\n") and "\n# mine\n" in card and "/secret" not in card
    steps, names = "7 rollouts, 13 gradient", ("`Base-1B`", "`dppo_binary_kl`", "`p.jsonl`", "my:own")
    assert all(part in card for part in (steps, "rank 32", "0.07", *names))
    assert ("`q.jsonl`" in card) == isinstance(prompts, list)
    assert hashlib.sha256(settings.encode()).hexdigest() in card
