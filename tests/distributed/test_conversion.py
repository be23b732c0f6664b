"""`megatron-dppo convert` and tools/convert_checkpoint.py both ways, bit for bit, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.convert.sources import StoredWeights
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.cli import app
from megatron_dppo.runtime.process import Runtime
from tests.support.converting import convert, differences
from tests.support.converting import converted as converts
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model
from tests.support.tiny_families import write_family

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 model with a dense layer among MoE ones, and its Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("conversion")
    write_model(folder / "first", mlp_only_layers=[1])
    model = Qwen3MoeForCausalLM.from_pretrained(folder / "first", dtype=torch.bfloat16)
    model.save_pretrained(folder / "hf", max_shard_size="50KB")
    command = [sys.executable, TOOL, "to-megatron", "--hf", folder / "hf", "--out", folder / "megatron"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_there_and_back_is_bit_exact(converted: Path) -> None:
    done = convert(
        *("to-hf", "--megatron", converted / "megatron", "--out", converted / "back", "--shard-size", "0.05MB")
    )
    assert done.exit_code == 0, done.stderr
    assert set(HFWeights(converted / "back").dtypes().values()) == {"BF16"}
    assert differences(converted / "hf", converted / "back") == []
    model = Qwen3MoeForCausalLM.from_pretrained(converted / "back", dtype=torch.bfloat16)
    original = Qwen3MoeForCausalLM.from_pretrained(converted / "hf", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())
    assert (converted / "back" / "config.json").read_bytes() == (converted / "hf" / "config.json").read_bytes()


@pytest.fixture
def described(converted: Path, tmp_path: Path) -> Path:
    """The model with the extra files that publishers ship, and README.md, which a conversion leaves out."""
    folder = tmp_path / "described"
    shutil.copytree(converted / "hf", folder)
    for name in (*BESIDE, "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
        (folder / name).chmod(0o400)
    return folder


BESIDE = (
    *("LICENSE", "License.txt", "NOTICE", "Notice.md", "USE_POLICY.md", "chat_template.jinja"),
    *("additional_chat_templates/tool_use.jinja", "tekken.json", "spiece.model"),
)


def test_published_extra_files_are_copied_with_the_umasks_mode(described: Path, tmp_path: Path) -> None:
    """Both ways; safetensors would write mode 0600, and copies would keep a mode that no one can change."""
    before = os.umask(0o027)
    try:
        converted_ = convert("to-megatron", "--hf", described, "--out", tmp_path / "megatron")
        back = convert("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    finally:
        os.umask(before)
    assert (converted_.exit_code, back.exit_code) == (0, 0), converted_.output + back.output
    for folder in (tmp_path / "megatron" / "hf", tmp_path / "back"):
        assert [name for name in BESIDE if (folder / name).read_text() != name] == []
        assert not (folder / "README.md").exists(), "the card of another model"
    written = [file for name in ("megatron", "back") for file in (tmp_path / name).rglob("*") if file.is_file()]
    assert {oct(file.stat().st_mode & 0o777) for file in written} == {"0o640"}


@pytest.mark.parametrize("spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {}])
def test_config_json_names_the_type_of_the_tensors(
    converted: Path, tmp_path: Path, spelling: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(converted / "hf", tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    content = json.loads(file.read_text())
    del content["dtype"]
    file.write_text(json.dumps(content | spelling | {"part_config": {"dtype": "bfloat16"}}))
    wide, back, narrow = (tmp_path / name for name in ("wide", "back", "narrow"))
    assert convert("to-megatron", "--hf", tmp_path / "hf", "--out", wide, "--dtype", "float32").exit_code == 0
    assert "--dtype" not in caplog.text, "nothing is lost"
    assert convert("to-hf", "--megatron", wide, "--out", back).exit_code == 0
    key = next(iter(spelling), "dtype")
    for folder in (wide / "hf", back):
        named = json.loads((folder / "config.json").read_text())
        assert (named[key], named["part_config"]["dtype"]) == ("float32", "float32")
    loaded = Qwen3MoeForCausalLM.from_pretrained(back, dtype="auto")
    assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float32}
    with caplog.at_level("INFO"):
        done = convert("to-hf", "--megatron", wide, "--out", narrow, "--dtype", "bfloat16")
    assert done.exit_code == 0 and "--dtype bfloat16 changed 0.00% of " in caplog.text, "they were bfloat16"
    assert json.loads((narrow / "config.json").read_text())[key] == "bfloat16"
    assert differences(converted / "hf", narrow) == []


@pytest.mark.parametrize(
    "architecture", [name for name, family in FAMILIES.items() if any(r.is_expert for r in family.rules)]
)
def test_stacked_experts_of_transformers_are_split_per_expert(tmp_path: Path, architecture: str) -> None:
    write_family(tmp_path / "apart", architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "apart", dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "stacked" / "model.safetensors"))
    done = convert("to-megatron", "--hf", tmp_path / "stacked", "--out", tmp_path / "megatron")
    assert done.exit_code == 0, done.output
    assert differences(tmp_path / "apart", tmp_path / "stacked") == []
    assert convert("verify", tmp_path / "apart", tmp_path / "megatron").exit_code == 0


@pytest.fixture(
    params=[name for name, family in FAMILIES.items() if any(r.may_be_float32 for r in family.rules)]
)
def in_two_types(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A bfloat16 model with float32 parts whose digits bfloat16 does not have, as Qwen3.5 is published."""
    folder = write_family(tmp_path / "hf", request.param, torch.bfloat16)
    exact = ("linear_attn.A_log", "linear_attn.norm.weight")
    change_tensors(folder, lambda name, x: x.float() * 1.001 if name.endswith(exact) else x)
    return folder


def change_tensors(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace the tensors of a folder with one file."""
    changed = {name: change(name, x) for name, x in load_file(folder / "model.safetensors").items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_published_in_float32_stay_float32(
    in_two_types: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    converts("to-megatron", "--hf", in_two_types, "--out", tmp_path / "megatron")
    converts("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")
    assert differences(in_two_types, tmp_path / "back") == []
    assert Counter(HFWeights(tmp_path / "back").dtypes().values())["F32"] == 4
    for folder in (tmp_path / "megatron" / "hf", tmp_path / "back"):
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    with caplog.at_level("INFO"):
        converts("to-hf", "--megatron", tmp_path / "megatron", "--out", tmp_path / "a", "--dtype", "bfloat16")
        converts("to-megatron", "--hf", in_two_types, "--out", tmp_path / "b", "--dtype", "bfloat16")
    named = "--dtype bfloat16 rounds 2 x linear_attn.A_log, 2 x linear_attn.norm.weight, which"
    assert caplog.text.count(named) == 2
    assert set(HFWeights(tmp_path / "a").dtypes().values()) == {"BF16"}
    assert convert("verify", tmp_path / "a", tmp_path / "b").exit_code == 0


def test_a_quantised_folder_and_weights_for_an_engine_keep_them_too(in_two_types: Path, tmp_path: Path) -> None:
    arguments = [
        "--hf",
        str(in_two_types),
        "--out",
        str(tmp_path / "8"),
        "--format",
        "fp8_block",
        "--no-measure",
    ]
    done = CliRunner().invoke(app, ["quantize", *arguments])
    assert done.exit_code == 0, done.output
    source, here = HFWeights(in_two_types), Runtime(torch.device("cpu"), 0, 1)
    exact = {name: source.tensor(name) for name, dtype in source.dtypes().items() if dtype == "F32"}
    engine = dict(StoredWeights(in_two_types, torch.bfloat16, here).weights())
    for found in (engine, {name: HFWeights(tmp_path / "8").tensor(name) for name in exact}):
        assert all(torch.equal(found[name], tensor) for name, tensor in exact.items()) and len(exact) == 4
    assert {name for name, tensor in engine.items() if tensor.dtype != torch.bfloat16} == exact.keys()


def trained_values(runtime: Runtime, folder: str, dtype: str) -> list[dict[str, torch.Tensor]]:
    """What an actor pushes, of the published folder and of the converted one."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config

    paths = f"{folder}/hf", f"{folder}/megatron"
    configs = [Config.model_validate({"model": {"load": path, "dtype": dtype}}) for path in paths]
    return [{name: x.clone() for name, x in Actor(config, runtime).weights()} for config in configs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_has_every_bit_in_float32_and_one_type_in_bfloat16(
    in_two_types: Path, tmp_path: Path, dtype: str
) -> None:
    converts("to-megatron", "--hf", in_two_types, "--out", tmp_path / "megatron")
    source, wanted = HFWeights(in_two_types), getattr(torch, dtype)
    for pushed in run_ranks(trained_values, 1, tmp_path, str(tmp_path), dtype)[0]:
        assert pushed.keys() == source.names
        assert [name for name, x in pushed.items() if not torch.equal(x, source.tensor(name).to(wanted))] == []
        assert {x.dtype for x in pushed.values()} == {wanted}


@pytest.mark.parametrize("odd", ["0.linear_attn.dt_bias", "1.self_attn.q_norm.weight", "2.linear_attn.A_log"])
def test_other_tensors_of_a_second_type_are_refused_by_name(
    in_two_types: Path, tmp_path: Path, odd: str
) -> None:
    """A part of all layers may be float32, but not a part of some layers."""
    name = f"model.layers.{odd}"
    change_tensors(in_two_types, lambda n, x: x.float() if n == name else x)
    if odd.endswith("A_log"):
        change_tensors(in_two_types, lambda n, x: x.bfloat16() if n.endswith("A_log") and n != name else x)
    done = convert("to-megatron", "--hf", in_two_types, "--out", tmp_path / "out")
    assert done.exit_code == 2 and f"1 x torch.float32 ({name}, " in done.stderr, done.output
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_refused(converted: Path) -> None:
    done = convert("to-megatron", "--hf", converted / "hf", "--out", converted / "megatron")
    assert done.exit_code == 2
    assert "exists" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("architectures", ["BertForMaskedLM"], "BertForMaskedLM"),
        ("norm_topk_prob", False, "norm_topk_prob"),
        ("hidden_size", 64, "has shape"),
        ("num_hidden_layers", 2, "left over"),
    ],
)
def test_weights_and_config_that_do_not_fit_are_refused(
    converted: Path, tmp_path: Path, key: str, value: object, words: str
) -> None:
    shutil.copytree(converted / "hf", tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    done = convert("to-megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_torn_megatron_checkpoint_is_refused(converted: Path, tmp_path: Path) -> None:
    shutil.copytree(converted / "megatron", tmp_path / "torn")
    for file in (tmp_path / "torn" / "megatron").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:50])
    done = convert("to-hf", "--megatron", tmp_path / "torn", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.stderr
    assert "torn" in done.stderr
    done = convert("to-hf", "--megatron", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.exit_code == 2
