"""A conversion that is refused or fails leaves no output; a restart continues after the last whole file."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.converting import convert, converted, differences
from tests.support.tiny_families import write_family

SMALL = ("--shard-size", "0.03MB", "--writers", 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `hf`, and converted as `megatron`."""
    folder = tmp_path_factory.mktemp("models")
    write_family(folder / "hf", "Qwen3MoeForCausalLM", torch.bfloat16)
    converted("to-megatron", "--hf", folder / "hf", "--out", folder / "megatron", *SMALL)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def describe(folder: Path, **changes: Any) -> None:
    """Change config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def set_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    """Put a tensor into a folder."""
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: tensor}))


def without(name: str) -> Callable[[Path], None]:
    """Take a tensor out of a folder."""
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def truncated(folder: Path) -> None:
    """Keep the header and half of the file's tensors."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def indexed(file: str) -> Callable[[Path], None]:
    """Have an index name this file."""

    def write(folder: Path) -> None:
        index = {"weight_map": {"model.norm.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


SHARD = "model-00001-of-00001.safetensors"


def set_in_shard(folder: Path) -> None:
    shutil.copyfile(folder / "model.safetensors", folder / SHARD)


def set_index(folder: Path) -> None:
    weight_map = dict.fromkeys(load_file(folder / SHARD), SHARD)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a missing tensor": (without(NORM), ["1 tensors are missing", NORM]),
    "a tensor too many": (set_tensor("model.extra", torch.zeros(2)), ["1 are left over", "model.extra"]),
    "a wrong shape": (
        set_tensor(QUERY, torch.zeros(3, 32, dtype=torch.bfloat16)),
        ["model.safetensors", QUERY, "(3, 32)", "(64, 32)"],
    ),
    "a type that is no float": (
        set_tensor(NORM, torch.zeros(32, dtype=torch.int32)),
        ["model.safetensors", NORM, "torch.int32"],
    ),
    "mixed types": (set_tensor(NORM, torch.zeros(32)), ["1 x torch.float32", "--dtype"]),
    "a type without a name here": (
        set_tensor(NORM, torch.zeros(32, dtype=torch.int16)),
        ["model.safetensors", NORM, "I16"],
    ),
    "a truncated file": (truncated, ["model.safetensors", "torn"]),
    "an index that names a missing file": (
        indexed("model-9.safetensors"),
        ["model-9.safetensors", "not there"],
    ),
    "an unknown architecture": (
        lambda folder: describe(folder, architectures=["BertForMaskedLM"]),
        ["BertForMaskedLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"],
    ),
    "another number of experts": (lambda folder: describe(folder, num_experts=4), ["left over", "experts.4."]),
    "tied weights that differ": (
        lambda folder: describe(folder, tie_word_embeddings=True),
        ["'lm_head.weight' differs from 'model.embed_tokens.weight'"],
    ),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "two sets of weights": (
        lambda folder: (set_in_shard(folder), set_index(folder)),
        ["two sets of weights, model.safetensors", SHARD, "Remove model.safetensors, or remove model.safet"],
    ),
    "an old index next to the weights": (
        indexed(SHARD),
        [f"names {SHARD}: 1 of 1 files is not there", "Remove model.safetensors.index.json if"],
    ),
    "an adapter next to the weights": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        ["found adapter_config.json, an adapter", "merge-adapter"],
    ),
    "another format next to the weights": (
        lambda folder: save_file({"layers.0.wq": torch.zeros(2)}, folder / "consolidated.safetensors"),
        ["No tensor of the model is in consolidated.safetensors"],
    ),
    "no safetensors": (lambda folder: (folder / "model.safetensors").unlink(), ["no *.safetensors"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_file_and_tensor(models: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(models / "hf", tmp_path / "hf")
    change, words = BAD[case]
    change(tmp_path / "hf")
    done = convert("to-megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"], "nothing is left"


def torn(folder: Path) -> None:
    """Zero the middle of a file of tensors; its length stays."""
    file = max((folder / "megatron").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(content[:2000] + bytes(len(content) - 3000) + content[-1000:])


BAD_MEGATRON: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a torn file": (torn, [".distcp", "torn"]),
    "a missing file": (
        lambda folder: next((folder / "megatron").glob("*.distcp")).unlink(),
        [".distcp", "torn or missing"],
    ),
    "another model": (
        lambda folder: describe(folder / "hf", num_hidden_layers=2),
        ["decoder.layers.self_attention.linear_qkv.layer_norm_weight", "(3, 32)", "(2, 32)"],
    ),
    "a model with more": (
        lambda folder: describe(folder / "hf", tie_word_embeddings=True),
        ["output_layer.weight"],
    ),
    "no Megatron checkpoint": (lambda folder: shutil.rmtree(folder / "megatron"), ["megatron/metadata.json"]),
}


@pytest.mark.parametrize("case", BAD_MEGATRON)
def test_a_bad_megatron_checkpoint_is_refused(models: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(models / "megatron", tmp_path / "megatron")
    change, words = BAD_MEGATRON[case]
    change(tmp_path / "megatron")
    done = convert("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert not (tmp_path / "out").exists()


WAYS = {
    "to-megatron": ("--hf", "hf"),
    "to-hf": ("--megatron", "megatron"),
}
ways = pytest.mark.parametrize("way", WAYS)


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files cannot grow larger, as on a full disk; smaller ones still fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ways
def test_full_disk_is_reported_and_the_same_command_resumes(models: Path, tmp_path: Path, way: str) -> None:
    kind, source = WAYS[way]
    arguments = (way, kind, models / source, "--out", tmp_path / "out", *SMALL)
    with full_disk(12_000):
        done = convert(*arguments)
    assert done.exit_code == 2, done.output
    assert "Is the disk full?" in done.stderr and ".out.unfinished" in done.stderr
    assert not (tmp_path / "out").exists()
    before = written(tmp_path / ".out.unfinished")
    converted(*arguments)
    after = written(tmp_path / "out")
    assert before.items() <= after.items(), "complete files are used again"
    assert not (tmp_path / ".out.unfinished").exists()
    converted("verify", models / "hf", tmp_path / "out")


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and mtime of each complete file of tensors."""
    files = [file for pattern in ("*.distcp", "*.safetensors") for file in folder.rglob(pattern)]
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


@ways
def test_interrupted_conversion_keeps_its_complete_files(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    import tqdm

    kind, source = WAYS[way]
    arguments = (
        way,
        kind,
        models / source,
        "--out",
        tmp_path / "out",
        "--shard-size",
        "0.03MB",
        "--writers",
        1,
    )
    progress = tqdm.tqdm.update

    def update(bar: Any, num_bytes: float = 1) -> Any:
        progress(bar, num_bytes)
        if bar.n > 80_000:
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as patched:
        patched.setattr(tqdm.tqdm, "update", update)
        assert convert(*arguments).exit_code != 0
    assert not (tmp_path / "out").exists()
    before = written(tmp_path / ".out.unfinished")
    assert before, "at least two files were complete"
    converted(*arguments)
    assert before.items() <= written(tmp_path / "out").items()
    converted("verify", models / "hf", tmp_path / "out")


def test_conversion_interrupted_before_its_metadata_resumes(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tensor files are complete, and the metadata is missing."""
    from megatron_dppo.checkpoints.megatron_save import StreamedSave

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    arguments = ("to-megatron", "--hf", models / "hf", "--out", tmp_path / "out", *SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(StreamedSave, "finish", interrupted)
        assert convert(*arguments).exit_code != 0
    before = written(tmp_path / ".out.unfinished")
    converted(*arguments)
    assert written(tmp_path / "out") == before
    converted("verify", models / "hf", tmp_path / "out")


@ways
def test_another_conversion_does_not_reuse_unfinished_files(models: Path, tmp_path: Path, way: str) -> None:
    kind, source = WAYS[way]
    arguments = (way, kind, models / source, "--out", tmp_path / "out", *SMALL)
    with full_disk(12_000):
        assert convert(*arguments).exit_code == 2
    before = written(tmp_path / ".out.unfinished")
    converted(*arguments, "--dtype", "float32")
    assert not before.items() & written(tmp_path / "out").items()
    assert convert("verify", models / "hf", tmp_path / "out").exit_code == 1


@ways
def test_too_little_disk_space_is_refused_before_writing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    kind, source = WAYS[way]
    done = convert(way, kind, models / source, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "1 B are free on its disk; expected at least" in done.stderr
    assert not (tmp_path / "out").exists()


def test_verify_lists_the_differences(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "hf", tmp_path / "hf")
    rewrite(tmp_path / "hf", lambda tensors: tensors[NORM][3:5].add_(1))
    set_tensor("model.extra", torch.zeros(2))(tmp_path / "hf")
    without(QUERY)(tmp_path / "hf")
    set_tensor("lm_head.weight", torch.zeros(97, 32))(tmp_path / "hf")
    for first in (models / "hf", models / "megatron"):
        done = convert("verify", first, tmp_path / "hf")
        assert done.exit_code == 1
        assert f"different: {NORM}: 2 of 32 elements" in done.stdout
        assert f"only in {first}: {QUERY}" in done.stdout
        assert f"only in {tmp_path / 'hf'}: model.extra" in done.stdout
        assert "different: lm_head.weight: torch.bfloat16 (97, 32) and torch.float32 (97, 32)" in done.stdout


def test_inspect_lists_the_contents_of_a_folder(models: Path) -> None:
    for folder, kind in (("hf", "Hugging Face folder"), ("megatron", "Megatron checkpoint")):
        done = convert("inspect", models / folder)
        assert done.exit_code == 0, done.output
        assert kind in done.stdout and "Qwen3MoeForCausalLM" in done.stdout and "62,592 elements" in done.stdout
    listed = convert("inspect", models / "megatron", "--tensors").stdout
    assert "decoder.layers.mlp.router.weight bfloat16 (3, 8, 32)" in listed


def test_both_spellings_and_both_layouts_of_experts_are_one_model(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "hf", tmp_path / "hf")
    describe(tmp_path / "hf", num_local_experts=8, num_experts=None)

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts."
            experts = [
                [tensors.pop(f"{prefix}{e}.{x}_proj.weight") for x in ("gate", "up", "down")] for e in range(8)
            ]
            tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair[:2]) for pair in experts])
            tensors[f"{prefix}down_proj"] = torch.stack([pair[2] for pair in experts])

    rewrite(tmp_path / "hf", stack)
    converted("to-megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    converted("verify", models / "hf", tmp_path / "out")
    converted("verify", models / "megatron", tmp_path / "out")


def test_published_8_bit_weights_become_bfloat16(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "hf", tmp_path / "hf")
    table = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    describe(tmp_path / "hf", quantization_config=table)
    expected: dict[str, torch.Tensor] = {}

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            expected[name] = tensors[name]
            if name.endswith("_proj.weight"):
                small, scale = tensors[name].float().to(torch.float8_e4m3fn), torch.tensor([[0.37]])
                tensors[name], tensors[f"{name}_scale_inv"] = small, scale
                expected[name] = (small.float() * scale).bfloat16()

    rewrite(tmp_path / "hf", quantize)
    converted("to-megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")
    converted("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert differences(tmp_path / "back", expected) == []
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
