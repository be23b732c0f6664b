"""An upcycled model computes the dense model's logits, in transformers and in Megatron, and trains."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.architectures.registry import family_of, read_hf_config
from megatron_dppo.checkpoints.convert import to_hf
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.runtime.process import Runtime
from tests.support.converting import convert, converted, differences
from tests.support.hf_reference import Reference
from tests.support.ranks import run_ranks
from tests.support.roundoff import Error, relative, require_close, worst
from tests.support.tiny import VOCAB, logits_of, random_groups
from tests.support.tiny_families import LLAMA3, SIZES, write_family

ALL_HEADS = {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "Llama": ("LlamaForCausalLM", {"rope_parameters": LLAMA3, **ALL_HEADS}, 3, 2),
    "Llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 8}, 5, 2),
    "Mistral": ("MistralForCausalLM", {"sliding_window": None, "rms_norm_eps": 1e-4}, 4, 3),
    "Qwen2": ("Qwen2ForCausalLM", {"head_dim": 8, **ALL_HEADS}, 3, 3),
    "Qwen2, tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "head_dim": 8}, 6, 2),
    "Qwen3": ("Qwen3ForCausalLM", ALL_HEADS, 7, 3),
    "Qwen3, tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "num_hidden_layers": 3}, 2, 2),
}
"""Dense architecture, changes to its tiny config, experts and top-k."""


def write_dense(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a dense model with files next to it; Mistral is not one of the tiny families."""
    if architecture != "MistralForCausalLM":
        write_family(folder, architecture, **changes)
    else:
        torch.manual_seed(0)
        config = transformers.MistralConfig(**SIZES | changes)
        transformers.MistralForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("another model")
    return folder


def upcycled(dense: Path, out: Path, experts: int, top_k: int, *options: object) -> Path:
    converted("upcycle", "--hf", dense, "--out", out, "--experts", experts, "--top-k", top_k, *options)
    return out


@torch.no_grad()
def logits_in_transformers(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(2 * 12).view(2, 12) % VOCAB).logits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each case the dense model, `NAME moe`, and `NAME megatron`, which is that in Megatron's form."""
    folder = tmp_path_factory.mktemp("upcycled")
    for case, (architecture, changes, experts, top_k) in CASES.items():
        moe = upcycled(
            write_dense(folder / case, architecture, **changes), folder / f"{case} moe", experts, top_k
        )
        converted("to-megatron", "--hf", moe, "--out", folder / f"{case} megatron")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_dense_logits(models: Path, case: str) -> None:
    dense, moe = models / case, models / f"{case} moe"
    assert relative(logits_in_transformers(moe), logits_in_transformers(dense)) < 1e-5
    hf, weights = read_hf_config(moe), HFWeights(moe)
    assert weights.shapes() == family_of(hf).hf_shapes(hf)
    sizes = family_of(hf).sizes_of(hf)
    assert (sizes.num_experts, sizes.experts_per_token) == CASES[case][2:]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (moe / name).read_bytes() == (dense / name).read_bytes()
    card = (moe / "README.md").read_text()
    assert f"--experts {CASES[case][2]} --top-k {CASES[case][3]}" in card and "2212.05055" in card
    assert ("The shared expert is" in card, "layer is the embedding" in card) == (
        "Qwen2" in case,
        "tied" in case,
    )


def measure_all(runtime: Runtime, folder: str) -> dict[str, tuple[Error, bool, Error]]:
    return {case: measure(runtime, Path(folder), case) for case in CASES}


def measure(runtime: Runtime, folder: Path, case: str) -> tuple[Error, bool, Error]:
    """Error of an actor's logits against the dense model; whether a step is skipped; the error after it."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    config = Config.model_validate(
        {
            "model": {"load": str(folder / f"{case} megatron"), "dtype": "float32"},
            "parallel": {"max_tokens_per_microbatch": 60},
            "algorithm": {"preset": "dppo_binary_tv"},
            "optimizer": {"distributed": False, "lr": 1e-2, "warmup_steps": 0},
        }
    )
    actor = Actor(config, runtime)
    groups = random_groups(4, routing=actor.routing)
    samples = [s for group in with_advantages(groups, False) for s in group.samples]
    shape = BatchShape("token_mean", 16, 60, routing=actor.routing)
    (batch,), _ = train_batches([list(samples)], shape, actor.data_parallel)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / case, dtype=torch.float32)
    reference = Reference.of(model)
    error = worst(reference.packed_logit_error(logits_of(actor, m), m) for m in batch.microbatches)
    step = actor.train_step(batch, is_first=True)
    after = worst(reference.packed_logit_error(logits_of(actor, m), m) for m in batch.microbatches)
    return error, step.is_skipped, after


@pytest.fixture(scope="module")
def found(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Error, bool, Error]]:
    return run_ranks(measure_all, 1, tmp_path_factory.mktemp("rank"), str(models))[0]


@pytest.mark.parametrize("case", CASES)
def test_megatron_computes_the_dense_logits_and_trains(found: Any, case: str) -> None:
    error, is_skipped, error_after_a_step = found[case]
    require_close({"logits": error})
    assert not is_skipped
    assert 1e-4 < error_after_a_step.value < 10


DRAWN = ["Llama", "Qwen2, tied", "Qwen3"]


@pytest.mark.parametrize("case", DRAWN)
def test_drawn_weights_depend_on_the_seed_and_not_on_shards(models: Path, tmp_path: Path, case: str) -> None:
    def made(name: str, *options: object) -> Path:
        return upcycled(models / case, tmp_path / name, CASES[case][2], 2, *options)

    whole = made("whole", "--noise", 0.1, "--reinit", 0.5, "--seed", 3)
    files = made(
        "files", "--noise", 0.1, "--reinit", 0.5, "--seed", 3, "--shard-size", "0.03MB", "--writers", 2
    )
    assert differences(whole, files) == []
    drawn = {name for name in HFWeights(whole).names if ".experts." in name or name.endswith(".gate.weight")}
    assert set(differences(whole, made("other", "--noise", 0.1, "--reinit", 0.5, "--seed", 4))) == drawn


@pytest.mark.parametrize("case", DRAWN)
def test_half_of_each_experts_features_are_drawn_again(models: Path, tmp_path: Path, case: str) -> None:
    """The same features in all three linears, other ones in each expert, as widely spread as before."""
    num_experts = CASES[case][2]
    made = upcycled(models / case, tmp_path / "made", num_experts, 2, "--reinit", 0.5)
    old, changed = by_feature(HFWeights(models / case), "mlp."), set[frozenset[int]]()
    for expert in range(num_experts):
        new = by_feature(HFWeights(made), f"experts.{expert}.")
        new["down"] *= 2 if case.startswith("Qwen2") else 1
        rows = {name: (new[name] != old[name]).any(1).nonzero()[:, 0].tolist() for name in new}
        assert rows["gate"] == rows["up"] == rows["down"] and len(rows["up"]) == len(old["up"]) // 2
        for name in new:
            drawn, replaced = new[name][rows[name]], old[name][rows[name]]
            assert float(drawn.std() / replaced.std()) == pytest.approx(1, rel=0.15)
        changed.add(frozenset(rows["up"]))
    assert len(changed) == num_experts


@pytest.mark.parametrize("case", DRAWN)
def test_noise_is_relative_to_a_tensor_and_of_each_expert(models: Path, tmp_path: Path, case: str) -> None:
    num_experts = CASES[case][2]
    made = HFWeights(upcycled(models / case, tmp_path / "made", num_experts, 2, "--noise", 0.1))
    old = by_feature(HFWeights(models / case), "mlp.")["up"]
    noises = [by_feature(made, f"experts.{expert}.")["up"] - old for expert in range(num_experts)]
    assert [float(noise.std() / old.std()) for noise in noises] == pytest.approx([0.1] * num_experts, rel=0.15)
    assert all(relative(noise, noises[0]) > 1 for noise in noises[1:])


def by_feature(weights: HFWeights, part: str) -> dict[str, torch.Tensor]:
    """The linears of a feed-forward of the second layer, whose names have a part: each [features, hidden]."""
    linears = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
    found = {
        linear: weights.tensor(name).clone()
        for name in sorted(weights.names)
        for linear, spellings in linears.items()
        if "layers.1." in name and part in name and name.split(".")[-2] in spellings
    }
    return found | {"down": found["down"].T}


def describe(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def as_megatron(folder: Path) -> None:
    converted("to-megatron", "--hf", folder, "--out", folder.with_name("megatron"))
    shutil.rmtree(folder)
    folder.with_name("megatron").rename(folder)


def without_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")


def test_an_interrupted_command_resumes_and_other_options_start_again(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed alone changes; it names no file."""
    options = ("--noise", 0.1, "--shard-size", "0.03MB", "--seed")
    whole = upcycled(models / "Qwen3", tmp_path / "whole", 7, 3, *options, 1)
    save, saved = to_hf.save_tensors, list[Path]()

    def save_three(tensors: Any, path: Path, **metadata: Any) -> None:
        saved.append(path)
        if len(saved) > 3:
            raise OSError("full")
        save(tensors, path, **metadata)

    for seed in (2, 1):
        saved.clear()
        monkeypatch.setattr(to_hf, "save_tensors", save_three)
        done = convert(
            *("upcycle", "--hf", models / "Qwen3", "--out", tmp_path / "out", "--experts", 7, "--top-k", 3),
            *options,
            seed,
        )
        assert done.exit_code == 2, done.output
        assert len(list(tmp_path.glob(".out.unfinished/*.safetensors"))) == 3
    monkeypatch.setattr(to_hf, "save_tensors", lambda *a, **k: (saved.append(a[1]), save(*a, **k)))
    saved.clear()
    upcycled(models / "Qwen3", tmp_path / "out", 7, 3, *options, 1)
    assert len(saved) == len(list(whole.glob("*.safetensors"))) - 3
    assert differences(whole, tmp_path / "out") == []


REFUSED: dict[str, tuple[str, Callable[[Path], Any], tuple[object, ...], list[str]]] = {
    "more chosen than there are": ("Llama", lambda _: None, ("--experts", 3, "--top-k", 4), ["--top-k", "4"]),
    "one chosen": ("Llama", lambda _: None, ("--top-k", 1), ["--top-k", "at least 2"]),
    "experts already": ("Llama moe", lambda _: None, (), ["--hf: found", "MixtralForCausalLM"]),
    "a Megatron checkpoint of experts": ("Qwen3 megatron", lambda _: None, (), ["--hf: found"]),
    "a Megatron checkpoint": ("Qwen3", as_megatron, (), ["megatron-dppo convert to-hf"]),
    "a window": ("Mistral", describe(sliding_window=16), (), ["--hf: found", "sliding_window = 16"]),
    "another variant": ("Llama", describe(attention_bias=True), (), ["--hf: found", "attention_bias"]),
    "no config": ("Qwen2", lambda f: (f / "config.json").unlink(), (), ["--hf: found", "neither"]),
    "no weights": ("Qwen2", lambda f: (f / "model.safetensors").unlink(), (), ["no *.safetensors"]),
    "a missing tensor": ("Qwen3", without_tensor, (), ["layers.1.mlp.up_proj"]),
    "another width": ("Qwen3", describe(intermediate_size=50), (), ["has shape", "48", "50"]),
    "an output that exists": ("Llama", lambda f: (f.parent / "out").mkdir(), (), ["--out", "exists"]),
}
"""By case: a model, a change of a copy of it, options, and words of the message."""


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_a_tensor_is_read(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, change, options, words = REFUSED[case]
    shutil.copytree(models / model, tmp_path / "in")
    change(tmp_path / "in")
    monkeypatch.setattr(HFWeights, "tensor", lambda *_: pytest.fail("a tensor was read"))
    done = convert("upcycle", "--hf", tmp_path / "in", "--out", tmp_path / "out", *options)
    assert done.exit_code == 2, done.output + repr(done.exception)
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert not list((tmp_path).glob("out/*")) and not list(tmp_path.glob(".out*"))
