"""`megatron-dppo quantize`: what it writes, reads back, measures and refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from megatron_dppo.analysis.mismatch.quantized import rounding_inputs, rounding_of
from megatron_dppo.architectures.gpt_oss import GPT_OSS
from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.checkpoints.block_fp8 import BlockFP8
from megatron_dppo.checkpoints.convert.quantize import MISMATCH, Quantization, calibrate
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.model_files import read_convertible_config
from megatron_dppo.checkpoints.weight_formats import QuantizedFolder, WeightFormat, is_linear, round_linears
from megatron_dppo.cli import app
from megatron_dppo.errors import ConfigError, ConversionError
from megatron_dppo.runtime.files import write_jsonl
from tests.support.tiny_families import write_family
from tests.support.word_tokenizers import TOKENIZER

DENSE, MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
CASES: list[tuple[str, WeightFormat]] = [(DENSE, "fp8"), (DENSE, "nvfp4"), (MOE, "fp8"), (MOE, "nvfp4")]


def json_of(file: Path) -> Any:
    return json.loads(file.read_text())


def quantize(*arguments: object) -> Result:
    """Run the command without starting an interpreter for it."""
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and one with experts, whose config is spelled as transformers 4 does, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    for architecture in (DENSE, MOE):
        write_family(folder / architecture, architecture, torch.bfloat16, num_hidden_layers=2)
        TOKENIZER.save_pretrained(folder / architecture)
    file = folder / MOE / "config.json"
    config = json.loads(file.read_text())
    config |= {"num_experts": config.pop("num_local_experts"), "rope_theta": 1e4, "torch_dtype": "bfloat16"}
    config.pop("dtype", None)
    file.write_text(json.dumps(config))
    rows = [{"prompt": f"<bos> {i} 1 * 4 3 =", "answer": "0"} for i in range(6)]
    rows.insert(1, {"prompt": " 1" * 40, "answer": "0"})
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


def arguments(models: Path, out: Path, architecture: str = MOE, weight_format: str = "fp8") -> list[object]:
    options = ["--num-prompts", 4, "--max-tokens", 12, "--format", weight_format]
    return ["--hf", models / architecture, "--out", out, "--prompts", models / "prompts.jsonl", *options]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def written(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Architecture, format, folder, and what was printed."""
    architecture, weight_format = request.param
    out = tmp_path_factory.mktemp("written") / "out"
    done = quantize(*arguments(models, out, architecture, weight_format))
    assert done.exit_code == 0, done.output + repr(done.exception)
    return architecture, weight_format, out, done.stdout


def test_the_files_hold_the_formats_rounding_of_every_linear(models: Path, written: Any) -> None:
    """Bit for bit: linears as `round_linears` rounds them, whose arithmetic is modelopt's; the rest as is."""
    architecture, weight_format, out, _ = written
    original = HFWeights(models / architecture)
    expected = {name: original.tensor(name).clone() for name in original.names}
    round_linears(expected, weight_format)
    folder = QuantizedFolder(out)
    found = dict(folder.weights())
    assert found.keys() == expected.keys()
    assert folder.quantized == {name for name in expected if is_linear(name)} == folder.input_scales().keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.to(torch.bfloat16), expected[name]), name
        assert (tensor.dtype == torch.float32) == is_linear(name)
    num_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert num_bytes < sum(file.stat().st_size for file in original.files)


def test_other_files_and_unquantised_weights_equal_the_originals(models: Path, written: Any) -> None:
    architecture, weight_format, out, _ = written
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (models / architecture, out)
    )
    added = after.pop("quantization_config")
    assert after == before
    assert (added["quant_method"], added["quant_algo"]) == ("modelopt", weight_format.upper())
    gates = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)] if architecture == MOE else []
    assert added["ignore"] == ["lm_head", "model.embed_tokens", *gates]
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (models / architecture / file).read_bytes()
    assert not list(out.parent.glob(".*"))


def test_the_mismatch_is_measured_shown_and_written(written: Any) -> None:
    architecture, _, out, printed = written
    content = json_of(out / MISMATCH)
    found = content["statistics"]
    assert content["prompts"] == 4 and 4 <= found["num_tokens"] <= 48
    assert 0 < found["abs_prob_diff_mean"] <= found["tv_p99"] <= found["tv_p999"] <= found["tv_max"] <= 1
    assert found["kl_k3"] > 0 and found["ratio_min"] < 1 < found["ratio_max"]
    assert 0 < found["top1_agreement"] <= 1
    layers = {name for name in found if name.startswith("agreement_layer_")}
    assert layers == ({"agreement_layer_0", "agreement_layer_1"} if architecture == MOE else set())
    assert all(0.3 < found[layer] < 1 for layer in layers)
    for words in (f"{found['kl_k3']:.3e}", f"{found['top1_agreement']:.4%}", f"wrote {out}"):
        assert words in printed


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_latents_and_expert_biases_stay_as_they_are(models: Path, tmp_path: Path, architecture: str) -> None:
    write_family(tmp_path / architecture, architecture, torch.bfloat16, num_hidden_layers=2)
    TOKENIZER.save_pretrained(tmp_path / architecture)
    shutil.copy(models / "prompts.jsonl", tmp_path)
    done = quantize(*arguments(tmp_path, tmp_path / "out", architecture))
    assert done.exit_code == 0, done.output + repr(done.exception)
    original = HFWeights(tmp_path / architecture)
    folder = QuantizedFolder(tmp_path / "out")
    assert folder.quantized == {name for name in original.names if is_linear(name)}
    assert any("shared_experts" in name for name in folder.quantized)
    left = {name: tensor for name, tensor in folder.weights() if name not in folder.quantized}
    assert left.keys() == original.names - folder.quantized
    assert [
        name for name, tensor in left.items() if not torch.equal(tensor, original.tensor(name).to(tensor))
    ] == []
    biases = [name for name in left if stays_float32(name)]
    assert biases and {left[name].dtype for name in biases} == {torch.float32}
    ignored = json_of(tmp_path / "out" / "config.json")["quantization_config"]["ignore"]
    latents = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"] * (
        architecture != "Glm4MoeForCausalLM"
    )
    expected = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in latents]
    assert ignored == sorted([*expected, "lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"])


def test_patterns_leave_whole_units_in_bfloat16(models: Path, tmp_path: Path) -> None:
    """Names that the files leave unquantised are written one by one: no pattern reaches another layer."""
    flags = ["--exclude", "*.layers.1.*", "--exclude", "*.self_attn.*", "--no-measure"]
    done = quantize(*arguments(models, tmp_path / "out", weight_format="nvfp4"), *flags)
    assert done.exit_code == 0, done.output + repr(done.exception)
    quantized = QuantizedFolder(tmp_path / "out").quantized
    assert quantized and all(name.startswith("model.layers.0.mlp.experts.") for name in quantized)
    ignored = json_of(tmp_path / "out" / "config.json")["quantization_config"]["ignore"]
    older = json_of(tmp_path / "out" / "hf_quant_config.json")["quantization"]["exclude_modules"]
    attention = [f"model.layers.{layer}.self_attn.{x}_proj" for layer in (0, 1) for x in "qkvo"]
    others = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert ignored == older == sorted([*attention, *others, "model.layers.1.mlp.experts"])


@pytest.mark.parametrize("architecture", [DENSE, MOE])
def test_inputs_are_rounded_where_modelopt_rounds_them(models: Path, architecture: str) -> None:
    """Equal weights, ours and modelopt's inputs: the logits come together, but for halfway values."""
    theirs: Any
    ours: Any
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(models / architecture, dtype=torch.bfloat16).eval() for _ in "ab"
    )
    tokens = torch.arange(1, 25)
    calibrate(theirs, Quantization("fp8"), [tokens], lambda: None)
    scales: dict[str, Tensor] = {}
    for name, module in theirs.named_modules():
        if name.endswith("weight_quantizer") or "weight_quantizers." in name:
            module.disable()
        if name.endswith("input_quantizer") and module.is_enabled:
            experts = {f"{x}_proj_input_quantizer": f"0.{x.split('_')[0]}_proj" for x in ("gate_up", "down")}
            prefix, _, last = name.rpartition(".")
            linear = f"{prefix}.{experts[last]}" if last in experts else prefix
            scales[f"{linear}.weight"] = module.amax.float() / 448
    with torch.no_grad():
        expected, plain = (model(tokens[None]).logits.float() for model in (theirs, ours))
        roundings = {name: rounding_of("fp8", scale) for name, scale in scales.items()}
        with rounding_inputs(ours, roundings):
            found = ours(tokens[None]).logits.float()
        again = ours(tokens[None]).logits.float()
    assert torch.equal(again, plain)
    assert (found - expected).abs().mean() < 0.5 * (plain - expected).abs().mean()


def test_an_interrupted_start_is_resumed(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ConversionError("no memory")

    monkeypatch.setattr("megatron_dppo.analysis.mismatch.quantized.measure", fails)
    done = quantize(*arguments(models, tmp_path / "out", DENSE))
    assert done.exit_code == 2 and "no memory" in done.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("megatron_dppo.checkpoints.convert.quantize.quantize", fails)  # is not called again
    done = quantize(*arguments(models, tmp_path / "out", DENSE), "--no-measure")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "out" / MISMATCH).exists()


@pytest.mark.parametrize("architecture", [MOE, "DeepseekV3ForCausalLM", "MixtralForCausalLM"])
def test_blocks_are_written_as_a_push_sends_them(tmp_path: Path, architecture: str) -> None:
    """Without prompts, of float32 weights."""
    hf, out = write_family(tmp_path / "hf", architecture, num_hidden_layers=2), tmp_path / "out"
    flags = ["--exclude", "*.layers.1.self_attn.*", "--no-measure"]
    done = quantize("--hf", hf, "--out", out, "--format", "fp8_block", *flags)
    assert done.exit_code == 0, done.output + repr(done.exception)
    config = json_of(out / "config.json")
    form = BlockFP8.of(config)
    assert form is not None and config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    stored = HFWeights(hf)
    original = {n: stored.tensor(n) if stays_float32(n) else stored.tensor(n).bfloat16() for n in stored.names}
    expected = dict(form.quantized(original.items()))
    found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(bits(found[name]), bits(expected[name]))] == []
    linears = {name.removesuffix(".weight_scale_inv") for name in found if name.endswith("_scale_inv")}
    assert len(linears) > 10 and not any("layers.1.self_attn" in name for name in linears)
    again = HFWeights(out)
    assert again.names == stored.names
    assert (
        max(float((again.tensor(n) - original[n]).abs().max() / original[n].abs().max()) for n in original)
        < 0.05
    )


def test_blocks_are_measured_as_an_engine_rounds(models: Path, tmp_path: Path) -> None:
    done = quantize(*arguments(models, tmp_path / "out", MOE, "fp8_block"))
    assert done.exit_code == 0, done.output + repr(done.exception)
    found = json_of(tmp_path / "out" / MISMATCH)["statistics"]
    assert 0 < found["abs_prob_diff_mean"] < 0.1 and 0.3 < found["agreement_layer_1"] < 1


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def described(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "hf" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def prompts_of(*rows: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: write_jsonl(folder / "prompts.jsonl", rows)


def without_a_norm(folder: Path) -> None:
    file = folder / "hf" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


BAD: dict[str, tuple[Callable[[Path], Any], list[object], str]] = {
    "an output that is there": (lambda folder: (folder / "out").mkdir(), [], "out exists. Give a new folder"),
    "no prompt file": (lambda folder: (folder / "prompts.jsonl").unlink(), [], "found no such file"),
    "prompts without text": (
        prompts_of({"prompt": "", "answer": "0"}),
        [],
        "expected a non-empty",
    ),
    "another column": (prompts_of({"question": "1", "answer": "0"}), [], "expected a column 'prompt'"),
    "prompts that are too long": (lambda _: None, ["--max-tokens", 3], "none of 1 to 3 tokens"),
    "an unknown architecture": (described(architectures=["BertForMaskedLM"]), [], "found BertForMaskedLM"),
    "stacks of interleaved experts": (
        described(architectures=["GptOssForCausalLM"], **GPT_OSS.defaults),
        ["--format", "fp8_block"],
        "and single experts",
    ),
    "a quantised folder": (
        described(quantization_config={"quant_method": "modelopt"}),
        [],
        "Name the original model",
    ),
    "no folder": (lambda folder: shutil.rmtree(folder / "hf"), [], "hf, which does not exist"),
    "no tokenizer": (
        lambda folder: (folder / "hf" / "tokenizer.json").unlink(),
        [],
        "--hf: found no tokenizer",
    ),
    "a pattern of nothing": (lambda _: None, ["--exclude", "*.lm_head"], "--exclude: found '*.lm_head'"),
    "half of what is fused": (lambda _: None, ["--exclude", "*.q_proj"], "exclude all or none"),
    "another 8 bits": (described(quantization_config={"quant_method": "fp8"}), [], "Name the original model"),
    "a missing tensor": (without_a_norm, [], "1 tensors are missing (first: ['model.norm.weight'])"),
    "a missing tensor, in blocks": (without_a_norm, ["--format", "fp8_block"], "1 tensors are missing"),
    "half of a fused pair, in blocks": (
        lambda _: None,
        ["--format", "fp8_block", "--exclude", "*.up_proj"],
        "exclude all or none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_unquantisable_models_are_refused(models: Path, tmp_path: Path, case: str) -> None:
    spoil, flags, message = BAD[case]
    shutil.copytree(models / DENSE, tmp_path / "hf")
    shutil.copy(models / "prompts.jsonl", tmp_path)
    spoil(tmp_path)
    before = set(tmp_path.rglob("*"))
    options = ["--hf", tmp_path / "hf", "--out", tmp_path / "out", "--prompts", tmp_path / "prompts.jsonl"]
    done = quantize(*options, "--format", "fp8", "--max-tokens", 12, *flags)  # the last --format counts
    assert done.exit_code == 2, done.output + repr(done.exception)
    assert message in done.stderr
    left = {path for path in set(tmp_path.rglob("*")) - before if ".unfinished" not in str(path)}
    assert not left, left


def test_without_modelopt_the_extra_is_named(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    done = quantize(*arguments(models, tmp_path / "out"))
    assert done.exit_code == 2
    assert "nvidia-modelopt: found no such package" in done.stderr and "megatron_dppo[quantize]" in done.stderr


def test_a_quantised_folder_is_not_converted(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"'modelopt'.*Name the original model, in bfloat16"):
        read_convertible_config(written[2])


def test_a_folder_of_another_kind_is_not_read_as_quantised(models: Path) -> None:
    with pytest.raises(ConversionError, match="quant_method 'modelopt'"):
        QuantizedFolder(models / MOE)
