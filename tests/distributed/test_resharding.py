"""A checkpoint of one layout on another: the same weights, moments and step, and the same course after."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.tiny import VOCAB, random_groups, write_model

NUM_LAYERS = 4
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "DP2": (2, {}),
    "EP2": (2, {"expert": 2}),
    "TP2": (2, {"tensor": 2}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "CP2 EP2": (2, {"context": 2, "expert": 2}),
    "TP2 EP2 ETP2": (4, {"tensor": 2, "expert": 2}),
    "TP2 EP4": (4, {"tensor": 2, "expert": 4, "expert_tensor": 1}),
    "TP2 PP2": (4, {"tensor": 2, "pipeline": 2}),
}
NUM_BEFORE, NUM_AFTER = 2, 3
# Of all pairs, those that are always tested: from each layout to one process, and across to each.
_ACROSS = (
    ("EP2", "TP2"),
    ("TP2", "CP2 EP2"),
    ("CP2 EP2", "PP2 VPP2"),
    ("TP2 PP2", "TP2 EP2 ETP2"),
    ("TP2 EP2 ETP2", "TP2 EP4"),
    ("PP2 VPP2", "DP2"),
    ("one process", "EP2"),
    ("DP2", "TP2 PP2"),
)
PAIRS = [(source, target) for source in LAYOUTS for target in LAYOUTS]
QUICK = [(s, t) for s, t in PAIRS if t == "one process"] + list(_ACROSS)


def build(runtime: Runtime, model: str, layout: str, **tables: Any) -> Any:
    """An actor on a layout, with more tables of a config."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config

    config = Config.model_validate(
        {
            "model": {"load": model, "dtype": "float32"},
            "parallel": LAYOUTS[layout][1] | {"max_tokens_per_microbatch": 60},
            "optimizer": {"lr": 1e-2, "eps": 1e-2},
            **tables,
        }
    )
    return Actor(config, runtime)


def losses(runtime: Runtime, actor: Any, num_steps: int) -> list[float]:
    """Of so many gradient steps, each on the same samples."""
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from megatron_dppo.metrics.metrics import Metrics

    found: list[float] = []
    for _ in range(num_steps):
        groups = with_advantages(random_groups(4, routing=actor.routing), normalize_std=False)
        own = [s for group in groups[runtime.rank :: runtime.world_size] for s in group.samples]
        shape = BatchShape("token_mean", 16, 60, topk_columns=4, routing=actor.routing)
        (batch,), _ = train_batches([own], shape, actor.data_parallel)
        step = actor.train_step(batch, is_first=False)
        found.append(Metrics().merge(runtime.all_gather(step.metrics.state())).values()["loss/policy"])
    return found


def save(runtime: Runtime, actor: Any, folder: Path) -> Path:
    """A checkpoint of the run's kind."""
    from megatron_dppo.config.schema import CheckpointConfig
    from megatron_dppo.run.checkpoints import Checkpoints
    from megatron_dppo.run.state import RunPoint
    from megatron_dppo.types import RunState

    checkpoints = Checkpoints(
        folder, CheckpointConfig(asynchronous=False, reserve_gib=0), actor._config.model.load, runtime
    )
    checkpoints.save(actor, RunPoint(RunState(1, NUM_BEFORE, 1, {}), 0, ""))
    checkpoints.wait()
    return folder / f"step_{NUM_BEFORE:08d}"


def save_all(runtime: Runtime, model: str, folder: str, layouts: list[str]) -> dict[str, list[float]]:
    """Train, save, and train on: the losses after the save, per layout."""
    found: dict[str, list[float]] = {}
    for layout in layouts:
        actor = build(runtime, model, layout)
        losses(runtime, actor, NUM_BEFORE)
        save(runtime, actor, Path(folder, layout))
        found[layout] = losses(runtime, actor, NUM_AFTER)
        del actor
        gc.collect()
    return found


def load_all(
    runtime: Runtime, model: str, folder: str, layouts: list[str], pairs: list[tuple[str, str]]
) -> dict[str, Any]:
    """Load checkpoints of other layouts on these: what changes when saved again, and later losses."""
    from megatron_dppo.errors import CheckpointError
    from megatron_dppo.run.checkpoints import load

    found: dict[str, Any] = {}
    for layout in layouts:
        for source in [source for source, target in pairs if target == layout]:
            print(source, "->", layout, flush=True)  # in the log of a spawn that hangs
            actor = build(runtime, model, layout)
            checkpoint = Path(folder, source, f"step_{NUM_BEFORE:08d}")
            try:
                point = load(checkpoint, actor, runtime)
            except CheckpointError as error:
                found[f"{source} -> {layout}"] = str(error)
                continue
            again = save(runtime, actor, Path(folder, f"{source} on {layout}"))
            changed = differences(checkpoint, again) if runtime.is_main else []
            found[f"{source} -> {layout}"] = (changed, losses(runtime, actor, NUM_AFTER), point.state.step)
            del actor
            gc.collect()
    return found


def differences(checkpoint: Path, again: Path) -> list[str]:
    """Names of tensors that are not bitwise the same in both, gathered whole."""
    before, after = stored(checkpoint), stored(again)
    assert any("exp_avg_sq" in name for name in before), sorted(before)
    changed = sorted(before.keys() ^ after.keys())
    return changed + [
        name for name in before.keys() & after.keys() if not torch.equal(before[name], after[name])
    ]


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, gathered whole."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint / "megatron")
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(of.size, dtype=of.properties.dtype)
        for name, of in metadata.items()
        if isinstance(of, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    # A split vocabulary is padded to equal parts.
    return {n: t[:VOCAB] if _is_vocabulary(n) else t for n, t in tensors.items()}


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resharding")
    write_model(folder / "model", num_hidden_layers=NUM_LAYERS)
    return folder


def by_world_size() -> dict[int, list[str]]:
    """Layouts that one spawn can go through."""
    sizes = sorted({size for size, _ in LAYOUTS.values()})
    return {size: [name for name, (own, _) in LAYOUTS.items() if own == size] for size in sizes}


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, list[float]]:
    """Losses after each layout's save."""
    losses_after: dict[str, list[float]] = {}
    for world_size, layouts in by_world_size().items():
        losses_after |= spawn(folder, save_all, world_size, layouts)
    return losses_after


def spawn(folder: Path, function: Any, world_size: int, *arguments: Any) -> dict[str, Any]:
    """Rank 0's result."""
    own = folder / f"{function.__name__}{world_size}{len(list(folder.iterdir()))}"
    own.mkdir()
    inputs = (str(folder / "model"), str(folder), *arguments)
    result: dict[str, Any] = run_ranks(function, world_size, own, *inputs)[0]
    return result


def check(folder: Path, saved: dict[str, list[float]], pairs: list[tuple[str, str]]) -> None:
    """Every pair: nothing changes but the layout."""
    found: dict[str, Any] = {}
    for world_size, layouts in by_world_size().items():
        found |= spawn(folder, load_all, world_size, layouts, pairs)
    assert len(found) == len(pairs)
    for source, target in pairs:
        result = found[f"{source} -> {target}"]
        assert not isinstance(result, str), f"{source} -> {target}: {result}"
        changed, later, step = result
        assert changed == [], f"{source} -> {target}: not bitwise the same, gathered whole"
        assert step == NUM_BEFORE
        assert later == pytest.approx(saved[source], rel=1e-5), f"{source} -> {target}"


def test_checkpoints_move_between_layouts(folder: Path, saved: dict[str, list[float]]) -> None:
    check(folder, saved, QUICK)


@pytest.mark.slow
def test_checkpoints_move_between_all_layouts(folder: Path, saved: dict[str, list[float]]) -> None:
    check(folder, saved, [pair for pair in PAIRS if pair not in QUICK])
