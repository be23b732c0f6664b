"""Hugging Face -> Megatron -> Hugging Face changes no bit, whatever layout loads, saves or pushes between."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.registry import FAMILIES, family_of
from megatron_dppo.runtime.process import Runtime
from tests.distributed.test_resharding import NUM_LAYERS, build, losses
from tests.support.converting import converted, differences
from tests.support.ranks import run_ranks
from tests.support.tiny_families import write_family

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    **{
        f"{name}, tied": (name, {"tie_word_embeddings": True})
        for name in ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
    },
    "Qwen3-MoE, tied, and a dense layer": (
        "Qwen3MoeForCausalLM",
        {"mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "Moonlight, every layer sparse": (
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "first_k_dense_replace": 0},
    ),
}
WITH_EXPERTS = [
    name
    for name, (architecture, _) in MODELS.items()
    if any(rule.is_expert for rule in FAMILIES[architecture].rules)
]
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "EP2": (2, {"expert": 2}),
    "EP2 ETP2": (4, {"expert": 2, "expert_tensor": 2}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2 PP2 EP2": (4, {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 1}),
}
BUCKET_BYTES = 2000  # less than a layer's pair of tensors that travel together
layouts = pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if size > 2 else ()) for name, (size, _) in LAYOUTS.items()],
)


def models_of(layout: str) -> list[str]:
    """Those that have what the layout splits."""
    return WITH_EXPERTS if "expert" in LAYOUTS[layout][1] else list(MODELS)


def save_again(runtime: Runtime, folder: str, layout: str, names: list[str]) -> dict[str, list[str]]:
    """Load each converted checkpoint on a layout, save it from there, and load what was saved once more.

    Returns:
        What is wrong with weights that are pushed from there, of each model.
    """
    from megatron_dppo.architectures.layout import Layout
    from megatron_dppo.architectures.registry import read_hf_config
    from megatron_dppo.checkpoints.hf_folder import write_hf_checkpoint
    from megatron_dppo.checkpoints.megatron_folder import HF, WEIGHTS, load_weights, model_states
    from megatron_dppo.checkpoints.megatron_weights import export_hf_weights, weight_buffers
    from megatron_dppo.checkpoints.model_files import copy_model_files
    from megatron_dppo.config.schema import ParallelConfig
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.mcore.groups import initialize_groups, megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config
    from tests.support.saving import save_sharded

    cpu.install()
    fixes.apply()
    parallel = Layout.of(ParallelConfig.model_validate(LAYOUTS[layout][1]), runtime.world_size)
    initialize_groups(parallel, seed=0)
    problems: dict[str, list[str]] = {}
    for name in names:
        model, source = Path(folder, name), Path(folder, f"{name}.megatron")
        out, exported = Path(folder, f"{name}.{layout}"), Path(folder, f"{name}.{layout}.exported")
        hf = read_hf_config(source)
        chunks = build_model(hf, transformer_config(hf, torch.bfloat16, megatron_sizes(parallel), {}))
        load_weights(chunks, source, hf)
        runtime.on_main(lambda out=out, model=model: copy_model_files(model, out / HF))
        runtime.on_main(lambda out=out: (out / WEIGHTS).mkdir())
        save_sharded(model_states(chunks), out / WEIGHTS)
        with torch.no_grad():
            for chunk in chunks:
                for tensor in (*chunk.parameters(), *(buffer for _, buffer in weight_buffers(chunk))):
                    tensor.fill_(float("nan"))
        load_weights(chunks, model, hf)
        weights = export_hf_weights(chunks, family_of(hf).weight_table(hf))
        if runtime.is_main:
            write_hf_checkpoint(weights, exported, model)
        else:
            list(weights)
        pushed, gathered = push_problems(runtime, chunks, hf, model), gathering_problems(chunks, hf, parallel)
        problems[name] = [*pushed, *gathered]
    return problems


def push_problems(runtime: Runtime, chunks: list[Any], hf: Any, model: Path) -> Iterator[str]:
    """Yield what is wrong with the buckets that all ranks send together, and each stage alone."""
    from megatron_dppo.architectures.published_names import stays_float32
    from megatron_dppo.checkpoints.hf_folder import HFWeights
    from megatron_dppo.checkpoints.megatron_weights import describe_hf_weights, export_hf_weights
    from megatron_dppo.engines.weight_sync.transports import Buffer

    together, stored = family_of(hf).travelling_together(hf), HFWeights(model)
    table = family_of(hf).weight_table(hf)
    for of_own_stage in (False, True):
        described = describe_hf_weights(chunks, table, of_own_stage=of_own_stage)
        weights = export_hf_weights(chunks, table, of_own_stage=of_own_stage, max_bytes=BUCKET_BYTES)
        buckets_of: dict[str, list[int]] = defaultdict(list)
        for number, bucket in enumerate(Buffer(BUCKET_BYTES, together=together).fill(weights)):
            parts = bucket.flat.split([math.prod(shape) for shape in bucket.shapes])
            for name, shape, part in zip(bucket.names, bucket.shapes, parts, strict=True):
                buckets_of[name].append(number)
                dtype = torch.float32 if stays_float32(name) else torch.bfloat16
                if part.dtype != dtype or not torch.equal(part.view(shape), stored.tensor(name).to(dtype)):
                    yield f"{name}: not the bits of the checkpoint"
        if set(buckets_of) != set(described) or any(len(numbers) > 1 for numbers in buckets_of.values()):
            yield f"names: {sorted(buckets_of.keys() ^ described.keys())}, or one that comes twice"
        of_groups: dict[str, set[int]] = defaultdict(set)
        for name in together.keys() & buckets_of.keys():
            of_groups[together[name]].update(buckets_of[name])
        yield from (f"{group}: in several buckets" for group, numbers in of_groups.items() if len(numbers) > 1)
        sent = set().union(*runtime.all_gather(set(buckets_of)))
        if sent != stored.names:
            yield f"names: {sorted(sent ^ stored.names)} are not the checkpoint's"


def gathering_problems(chunks: list[Any], hf: Any, layout: Any) -> Iterator[str]:
    """Yield a problem if the largest gathered size is not what the planner counts."""
    from megatron_dppo.architectures.parameters import largest_gathered_bytes, model_shape
    from megatron_dppo.checkpoints import megatron_weights as convert

    gather = convert._gather_piece
    for max_bytes in (None, BUCKET_BYTES, 3 * BUCKET_BYTES):
        found: list[int] = []

        def spy(*arguments: Any, found: list[int] = found) -> torch.Tensor:
            parts = gather(*arguments)
            found.append(parts.nbytes)
            return parts

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convert, "_gather_piece", spy)
            for _ in convert.export_hf_weights(chunks, family_of(hf).weight_table(hf), max_bytes=max_bytes):
                pass
        planned = largest_gathered_bytes(model_shape(hf), layout, 2, max_bytes)
        if max(found) != planned:
            yield f"gathered at a time with max_bytes {max_bytes}: {max(found)} bytes; planned {planned}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model in bfloat16, with a Megatron checkpoint of each."""
    folder = tmp_path_factory.mktemp("models")
    for name, (architecture, changes) in MODELS.items():
        write_family(folder / name, architecture, torch.bfloat16, num_hidden_layers=NUM_LAYERS, **changes)
        converted("to-megatron", "--hf", folder / name, "--out", folder / f"{name}.megatron")
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_changes_no_bit(models: Path, tmp_path: Path, name: str) -> None:
    source = models / f"{name}.megatron"
    converted("to-hf", "--megatron", source, "--out", tmp_path / "hf", "--shard-size", "0.05MB", "--writers", 2)
    assert differences(models / name, tmp_path / "hf") == []
    converted("verify", models / name, source)
    converted("verify", source, tmp_path / "hf")


@layouts
def test_weights_loaded_and_saved_by_a_layout_are_bitwise_equal(
    models: Path, tmp_path: Path, layout: str
) -> None:
    names = models_of(layout)
    for problems in run_ranks(save_again, LAYOUTS[layout][0], tmp_path, str(models), layout, names):
        assert problems == {name: [] for name in names}
    for name in names:
        assert differences(models / name, models / f"{name}.{layout}.exported") == [], "read directly"
        converted("to-hf", "--megatron", models / f"{name}.{layout}", "--out", tmp_path / name)
        assert differences(models / name, tmp_path / name) == [], "converted, loaded, saved, converted"


def train_both(runtime: Runtime, folder: str) -> list[list[float]]:
    """Losses of two steps from the Hugging Face folder, and from its conversion."""
    return [
        losses(runtime, build(runtime, str(Path(folder, name)), "one process"), 2)
        for name in ("hf", "megatron")
    ]


def test_a_converted_checkpoint_trains_as_the_original_does(tmp_path: Path) -> None:
    write_family(tmp_path / "hf", "Qwen3MoeForCausalLM", num_hidden_layers=NUM_LAYERS)
    converted("to-megatron", "--hf", tmp_path / "hf", "--out", tmp_path / "megatron")
    (before, after) = run_ranks(train_both, 1, tmp_path, str(tmp_path))[0]
    assert before == after and before[0] != before[1]


def convert_together(runtime: Runtime, folder: str) -> None:
    """Both ways, as the tool does under torchrun."""
    from megatron_dppo.checkpoints.convert.output import WriteOptions
    from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource, MegatronSource
    from megatron_dppo.checkpoints.convert.to_hf import write_hf
    from megatron_dppo.checkpoints.convert.to_megatron import write_megatron
    from megatron_dppo.checkpoints.hf_folder import HFWeights
    from megatron_dppo.checkpoints.model_files import read_convertible_config

    source, out = Path(folder, "Qwen3MoeForCausalLM"), Path(folder, "shared")
    options = WriteOptions(file_bytes=20_000)
    config = read_convertible_config(source)
    write_megatron(HuggingFaceSource(HFWeights(source)), config, out / "megatron", options, runtime)
    write_hf(MegatronSource(out / "megatron"), source, out / "hf", options, runtime)


def test_two_processes_share_a_conversion(models: Path, tmp_path: Path) -> None:
    run_ranks(convert_together, 2, tmp_path, str(models))
    shared = models / "shared"
    assert differences(models / "Qwen3MoeForCausalLM", shared / "hf") == []
    writers = {file.name.split("_")[2] for file in (shared / "megatron" / "megatron").glob("*.distcp")}
    assert writers == {"0", "1"}, "each process has written files"
    assert list(models.glob(".*")) + list(shared.glob(".*")) == []
