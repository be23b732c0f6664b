"""Published models without their weights: names and shapes of every rank of every published layout.

Models are built on the meta device, one rank after another, in one process whose group pretends to be large.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.architectures.registry import family_of, model_sizes
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.checkpoints.convert.stored_tensors import pieces_of
from megatron_dppo.plan.stages import partition
from megatron_dppo.runtime.process import Runtime
from tests.support.larger_recipes import LARGER
from tests.support.plan_models import QWEN3_30B, layout_of
from tests.support.qwen3_30b_recipes import RECIPES, Recipe
from tests.support.ranks import run_ranks

BLOCK_ELEMENTS = 1 << 25
Tile = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in a stored tensor
ALL = (*RECIPES, *LARGER)
# Experts with tensor parallelism, with pipelines, and with both; latent attention, and in an uneven pipeline.
QUICK = [RECIPES[0], RECIPES[5], RECIPES[7], LARGER[0], LARGER[1]]
LOADED = [RECIPES[0], LARGER[0], LARGER[1]]
loaded = pytest.mark.parametrize("recipe", LOADED, ids=lambda recipe: recipe.source)
recipes = pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, marks=() if recipe in QUICK else pytest.mark.slow) for recipe in ALL],
    ids=lambda recipe: recipe.source,
)


def untiled(tiles: Iterable[Tile], whole: tuple[int, ...]) -> str | None:
    """What is wrong with tiles that are to cover a tensor once; they are of one shape."""
    offsets, shapes = zip(*tiles, strict=True)
    if len(set(shapes)) != 1:
        return f"tiles of shapes {set(shapes)}"
    places = [zip(offset, shapes[0], whole, strict=True) for offset in offsets]
    is_on_grid = all(start % size == 0 and start < end for place in places for start, size, end in place)
    if not is_on_grid or len(set(offsets)) != len(offsets):
        return "tiles that overlap"
    covered = len(offsets) * math.prod(shapes[0])
    return None if covered == math.prod(whole) else f"{covered} of {math.prod(whole)} elements"


@contextmanager
def pretended(layout: Layout, rank: int) -> Iterator[None]:
    """Megatron's groups as this rank of a large job has them, without the other ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            layout.tensor,
            layout.pipeline,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def without_memory(hf: HFConfig, layout: Layout) -> list[Any]:
    """This rank's part of the model on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    from megatron_dppo.mcore.groups import megatron_sizes
    from megatron_dppo.models.build import build_model, transformer_config

    class OnMeta(TorchFunctionMode):  # Megatron names a device in each call
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = {"device": "meta"} if kwargs and "device" in kwargs else {}
            return func(*args, **{**(kwargs or {}), **named})

    with torch.device("meta"), OnMeta():
        config = transformer_config(hf, torch.bfloat16, megatron_sizes(layout), {})
        return build_model(hf, config)


def measure(runtime: Runtime, sources: list[str]) -> dict[str, dict[str, Any]]:
    """Of each layout: elements of each rank, and each stored tensor's shape and tiles."""
    from megatron_dppo.mcore import cpu, fixes
    from megatron_dppo.runtime import process as this_process

    this_process.stop()
    cpu.install()
    fixes.apply()
    return {recipe.source: measure_layout(recipe) for recipe in ALL if recipe.source in sources}


def measure_layout(recipe: Recipe) -> dict[str, Any]:
    """Every rank's model, one after another."""
    from megatron.core import parallel_state

    layout = layout_of(recipe.num_gpus, **recipe.sizes)
    elements: list[tuple[int, int]] = []  # pipeline stage, and elements
    tiles: dict[str, list[Tile]] = defaultdict(list)
    wholes: dict[str, tuple[int, ...]] = {}
    reads: Counter[str] = Counter()
    for rank in range(layout.world_size):
        with pretended(layout, rank):
            chunks = without_memory(recipe.model, layout)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            elements.append((stage, sum(p.numel() for chunk in chunks for p in chunk.parameters())))
            for tensor in main_tensors(chunks):
                tiles[tensor.key].append((tensor.global_offset, tensor.shape_in_whole))
                wholes[tensor.key] = tensor.global_shape
            if recipe in LOADED:
                reads.update(names_read(recipe.model, chunks))
    return {"elements": elements, "tiles": dict(tiles), "wholes": wholes, "reads": reads}


def main_tensors(chunks: list[Any]) -> Iterator[Any]:
    """Yield the parts of stored tensors that this rank writes."""
    from types import SimpleNamespace

    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

    from megatron_dppo.checkpoints.megatron_folder import model_states

    for part in nested_values(model_states(chunks)):
        built = nested_values(part.build()) if isinstance(part, ShardedTensorFactory) else [part]
        for tensor in built:
            if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id):
                shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
                yield SimpleNamespace(
                    key=tensor.key,
                    global_offset=tuple(tensor.global_offset),
                    global_shape=tuple(tensor.global_shape),
                    shape_in_whole=shape,
                )


def names_read(hf: HFConfig, chunks: list[Any]) -> Counter[str]:
    """The Hugging Face tensors that filling this rank's parameters reads."""
    import torch

    from megatron_dppo.checkpoints.megatron_weights import load_hf_weights

    shapes, reads = family_of(hf).hf_shapes(hf), Counter[str]()

    class NamesAlone:
        folder, left_out = Path("published"), frozenset[str]()

        def file_of(self, name: str) -> Path:
            return self.folder / name

        def shapes(self) -> dict[str, tuple[int, ...]]:
            return dict(shapes)

        def tensor(self, name: str) -> torch.Tensor:
            reads[name] += 1
            return torch.empty(shapes[name], dtype=torch.bfloat16, device="meta")

    load_hf_weights(chunks, NamesAlone(), hf)  # type: ignore[arg-type]
    return reads


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], dict[str, Any]]:
    """What `measure_layout` gives: for the quick layouts at once, and for the slow ones."""
    found: dict[str, dict[str, Any]] = {}

    def of(recipe: Recipe) -> dict[str, Any]:
        if recipe.source not in found:
            kind = [other.source for other in ALL if (other in QUICK) == (recipe in QUICK)]
            found.update(run_ranks(measure, 1, tmp_path_factory.mktemp("layouts"), kind)[0])
        return found[recipe.source]

    return of


def test_the_published_model_has_the_names_and_the_size_that_it_has() -> None:
    shapes = family_of(QWEN3_30B).hf_shapes(QWEN3_30B)
    assert len(shapes) == 18_867
    assert sum(map(math.prod, shapes.values())) == 30_532_122_624
    assert shapes["model.layers.47.mlp.experts.127.down_proj.weight"] == (2048, 768)


@pytest.mark.parametrize("max_elements", [None, BLOCK_ELEMENTS, 1])
def test_each_tensor_is_in_one_piece_and_pieces_tile_what_is_stored(max_elements: int | None) -> None:
    pieces = list(pieces_of(QWEN3_30B, max_elements))
    names = [name for piece in pieces for name in piece.hf]
    assert len(names) == len(set(names)) == 18_867
    tiles: dict[str, list[Tile]] = defaultdict(list)
    for piece in pieces:
        assert piece.num_elements == sum(map(math.prod, piece.hf_shapes))
        tiles[piece.key].append((piece.offset, piece.shape))
    wholes = {piece.key: piece.whole for piece in pieces}
    assert {key: fault for key in tiles if (fault := untiled(tiles[key], wholes[key]))} == {}


@recipes
def test_each_parameter_of_a_layout_is_filled_once(
    measured: Callable[[Recipe], dict[str, Any]], recipe: Recipe
) -> None:
    found = measured(recipe)
    assert found["wholes"] == {piece.key: piece.whole for piece in pieces_of(recipe.model)}
    assert {
        k: fault for k, tiles in found["tiles"].items() if (fault := untiled(tiles, found["wholes"][k]))
    } == {}


@recipes
def test_each_rank_holds_the_bytes_that_the_planner_counts(
    measured: Callable[[Recipe], dict[str, Any]], recipe: Recipe
) -> None:
    shape = model_shape(recipe.model)
    parts = partition(shape, layout_of(recipe.num_gpus, **recipe.sizes), True)
    planned = [part.dense.own + part.expert.own for part in parts]
    elements = measured(recipe)["elements"]
    assert len(elements) == recipe.num_gpus
    assert {(stage, found, planned[stage]) for stage, found in elements if found != planned[stage]} == set()


@loaded
def test_a_rank_reads_its_own_experts_alone(
    measured: Callable[[Recipe], dict[str, Any]], recipe: Recipe
) -> None:
    reads, hf, sizes = measured(recipe)["reads"], recipe.model, recipe.sizes
    assert set(reads) == set(family_of(hf).hf_shapes(hf))
    of_experts = {number for name, number in reads.items() if ".experts." in name}
    others = {number for name, number in reads.items() if ".experts." not in name}
    of_stage = recipe.num_gpus // sizes.get("pipeline", 1)
    assert (of_experts, others) == ({of_stage // sizes["expert"]}, {of_stage})


def test_a_layout_that_does_not_divide_is_refused() -> None:
    from megatron_dppo.architectures.layout import layout_problems
    from megatron_dppo.config.schema import ParallelConfig

    problems = layout_problems(ParallelConfig(expert=6), 6, model_sizes(QWEN3_30B))
    assert any("128" in str(problem) for problem in problems), problems
