"""Every layout, crossed with features, equals one process: loss, every gradient, the update, every metric."""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dppo.architectures.layout import PROVEN, Layout, kind_of
from megatron_dppo.config import ParallelConfig
from megatron_dppo.runtime.process import Runtime
from tests.support import varlen_reference
from tests.support.layout_cases import (
    DENSE_LAYOUTS,
    FEATURES,
    LAYOUTS,
    OTHER_LAYOUTS,
    UNEVEN_LAYOUTS,
    Case,
    cases,
    layouts_of,
    references,
)
from tests.support.ranks import run_ranks
from tests.support.roundoff import COARSEST, OF_LAST_BITS, Error, move_last_bits, relative
from tests.support.tiny import gradients_of, random_groups, write_model
from tests.support.tiny_families import write_family

# The table layout x feature -> worst relative error in megatron_dppo/actor/LAYOUTS.md, as it was measured.


FILE = Path(__file__).parents[2] / "megatron_dppo" / "actor" / "LAYOUTS.md"
BEGIN, END = "<!-- layouts: written by `make layouts` -->", "<!-- end of layouts -->"
VALUES = [(feature, value) for feature, of in FEATURES.items() for value in of]


def worst_of(errors: dict[str, dict[str, Error]]) -> float:
    """The largest relative error of the loss, a gradient tensor or an update."""
    compared = errors["metrics"]["loss/policy"], *errors["gradients"].values(), *errors["updates"].values()
    return max(error.value for error in compared)


def write_table(measured: list[tuple[Case, float]]) -> None:
    """Replace the rows of layouts whose cases were all measured; others stay, under the same columns."""
    text = FILE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    FILE.write_text(f"{before}{BEGIN}\n{table(measured)}\n{END}{after}")


def table(measured: list[tuple[Case, float]]) -> str:
    """Markdown: a row for each layout, a column for each value of each feature."""
    head = _line(["layout", "processes", *(f"{feature} {value}" for feature, value in VALUES)])
    lines = [head, "|---" * (2 + len(VALUES)) + "|"]
    kept = {key: line for key, line in _written() if head in FILE.read_text()}
    for world_size in LAYOUTS:
        needed = list(cases(world_size))
        for name in layouts_of(world_size):
            own = [pair for pair in measured if (pair[0].name, pair[0].world_size) == (name, world_size)]
            known, key = [case for case, _ in own], (name, str(world_size))
            if all(case in known for case in needed if case.name == name):
                cells = [_cell([e for case, e in own if case.features[f] == value], f) for f, value in VALUES]
                lines.append(_line([*key, *cells]))
            elif key in kept:
                lines.append(kept[key])
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(errors: list[float], feature: str) -> str:
    absent = {"routes": "no routes", "prefixes": "refused"}
    return f"{max(errors):.1e}" if errors else absent[feature]


def rows() -> Iterator[tuple[str, str]]:
    """(layout, processes) of the file's table."""
    yield from (key for key, _ in _written())


def _written() -> Iterator[tuple[tuple[str, str], str]]:
    """((layout, processes), line) of the file's table."""
    text = FILE.read_text().partition(BEGIN)[2].partition(END)[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2 and cells[2].isdigit():
            yield (cells[1], cells[2]), line


Measure = Callable[[int, int | None, int | None], list[tuple[Case, dict[str, Any]]]]
NUM_LAYERS = 4
# Adam with so large an epsilon is smooth in the gradient: equal gradients, clipped by equal norms, give equal
# updates; with so large a rate they are not lost in the rounding of weights.
_SMOOTH = {"lr": 1.0, "eps": 0.03, "clip_grad": 0.5}
_SMOOTHER = _SMOOTH | {"eps": 0.003}  # experts that routers hardly weigh have gradients of 1e-5
_SMOOTHEST = _SMOOTH | {"eps": 0.002}  # of samples that begin alike, fewer reach such an expert


def step(runtime: Runtime, models: str, case: Case, *, is_moved: bool = False) -> dict[str, Any]:
    """One gradient step on one rank: loss, gradients, updates and metrics of the whole model.

    If `is_moved` is set, the last bits of all weights are moved before it.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_dppo.actor import forward
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from megatron_dppo.metrics.metrics import Metrics
    from megatron_dppo.models.packed_attention import PaddedBatches, VarlenSequences

    varlen_reference.install()
    forms = {"padded": PaddedBatches, "varlen": VarlenSequences}
    forward.attention_form = lambda *_: forms[case.features["attention"]]
    tables = case.tables()
    tables["parallel"]["max_tokens_per_microbatch"] = 60
    smoother = _SMOOTHEST if case.has_trees else _SMOOTHER
    tables["optimizer"] |= smoother if case.model in (*OTHER_LAYOUTS, "uneven") else _SMOOTH
    config = Config.model_validate(
        {"model": {"load": f"{models}/{case.reference.split('.')[0]}", "dtype": "float32"}, **tables}
    )
    actor = Actor(config, runtime)
    places = runtime.all_gather(actor.pipeline_place)
    first = sorted(stage for stage, _, is_first in places if is_first)
    assert first == list(range(actor.layout.pipeline)), "each stage has one rank that sends its weights"
    if is_moved:
        move_last_bits(parameter for chunk in actor.chunks for parameter in chunk.parameters())
        actor.optimizer.reload_model_params()
    groups = with_advantages(
        random_groups(8, routing=actor.routing, has_trees=case.has_trees), normalize_std=False
    )
    own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
    routing = actor.routing
    if routing is None:
        own = [replace(sample, routed_experts=None) for sample in own]
    is_shared = case.features["prefixes"] == "shared"
    shape = BatchShape("token_mean", 16, 60, topk_columns=4, routing=routing, shares_prefixes=is_shared)
    (batch,), report = train_batches([own], shape, actor.data_parallel)
    if is_shared:
        counts = runtime.all_gather((report.num_forwarded_tokens, report.num_tokens))
        forwarded, total = map(sum, zip(*counts, strict=True))
        assert forwarded < 0.9 * total, "trees are part of what is compared"
    records = routing is not None and case.features["routes"] == "off"
    recomputed = actor.with_recorded(batch) if records else actor.with_old_log_probs(batch)
    log_probs = recomputed.microbatches
    before = {name: tensor.clone() for name, tensor in actor.weights()}
    result = actor.train_step(batch, is_first=True, weight_version=3)
    gradients: dict[str, Tensor] = {}
    if not config.optimizer.distributed:
        gradients = gradients_of(actor)
    updates = {name: tensor - before[name] for name, tensor in actor.weights()}
    metrics = Metrics().merge(runtime.all_gather(result.metrics.state())).values()
    own_sum = sum(
        float((m.old_log_probs * m.loss_mask).sum()) for m in log_probs if m.old_log_probs is not None
    )
    sums: list[float] = [0.0] * actor.layout.data
    dist.all_gather_object(sums, own_sum, group=parallel_state.get_data_parallel_group())
    return {
        "gradients": gradients,
        "updates": updates,
        "metrics": metrics | {"sum of log-probs": sum(sums)},
        "faults": result.faults,
        "num_microbatches": len(batch.microbatches),
        "routes": _routes_by_sample(log_probs) if records else {},
    }


def _routes_by_sample(microbatches: tuple[Any, ...]) -> dict[str, list[Any]]:
    """The routes of every sample of the job; all ranks of a data-parallel group must have the same."""
    import torch.distributed as dist

    own: dict[str, list[Any]] = {}
    for microbatch in microbatches:
        rows = microbatch.routed_experts.indices.split(microbatch.cu_seqlens.diff().tolist())
        own |= {name: each.tolist() for name, each in zip(microbatch.sample_ids, rows, strict=False)}
    of_ranks: list[dict[str, list[Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    found: dict[str, list[Any]] = {}
    for of_rank in of_ranks:
        assert all(found.setdefault(name, rows) == rows for name, rows in of_rank.items())
    return found


def write_references(runtime: Runtime, models: str, folder: str) -> None:
    """On one process: what every layout must give."""
    for case in references():
        result = step(runtime, models, case)
        assert result["num_microbatches"] > 2, "packing must be part of what is compared"
        masks = "pg_is" not in case.reference
        assert (result["metrics"]["clipped/num_tokens_negative"] > 0) == masks, (
            "masked tokens are compared, too"
        )
        name = Path(folder, case.reference)
        save_file({n: t.contiguous() for n, t in result["gradients"].items()}, f"{name}.gradients")
        save_file({n: t.contiguous() for n, t in result["updates"].items()}, f"{name}.updates")
        Path(f"{name}.metrics").write_text(json.dumps(result["metrics"]))
        Path(f"{name}.routes").write_text(json.dumps(result["routes"]))
        moved = step(runtime, models, case, is_moved=True)
        Path(f"{name}.roundoffs").write_text(json.dumps(_differences(moved, result)))


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The relative differences of everything that both have, of metrics below 1e-3 to that."""
    return {
        "metrics": {
            name: abs(found["metrics"].get(name, torch.nan) - value) / max(abs(value), 1e-3)
            for name, value in expected["metrics"].items()
        },
        **{
            kind: {name: relative(tensor, expected[kind][name]) for name, tensor in found[kind].items()}
            for kind in ("gradients", "updates")
        },
    }


def compare_all(
    runtime: Runtime, models: str, folder: str, chosen: list[tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """All cases in one spawn; on rank 0 the relative errors of each."""
    from megatron.core.distributed import DistributedDataParallel

    results: list[dict[str, Any]] = []
    for fields in chosen:
        print(fields, flush=True)  # in the log of a spawn that hangs
        results.append(compare(runtime, models, folder, Case(*fields)))
        gc.collect()  # the threads of a process group end with the last reference to it
    left = sum(isinstance(each, DistributedDataParallel) for each in gc.get_objects())
    return [*results[:-1], results[-1] | {"models left": left}]


def compare(runtime: Runtime, models: str, folder: str, case: Case) -> dict[str, Any]:
    """The relative errors of one case."""
    found = step(runtime, models, case)
    name = Path(folder, case.reference)
    expected: dict[str, Any] = {kind: load_file(f"{name}.{kind}") for kind in ("gradients", "updates")}
    expected["metrics"] = json.loads(Path(f"{name}.metrics").read_text())
    for kind in ("gradients", "updates"):
        assert set(found[kind]) in (set(expected[kind]), set()), "each parameter is compared, none twice"
    roundoffs: dict[str, dict[str, float]] = json.loads(Path(f"{name}.roundoffs").read_text())
    errors = {
        kind: {n: Error.of(value, roundoffs[kind].get(n, 0.0), OF_LAST_BITS) for n, value in values.items()}
        for kind, values in _differences(found, expected).items()
    }
    extra = set(found["metrics"]) - set(expected["metrics"])
    routes = json.loads(Path(f"{name}.routes").read_text())
    extra |= {f"routes of {n}" for n in {*routes, *found["routes"]} if routes.get(n) != found["routes"].get(n)}
    return {"errors": errors, "faults": found["faults"], "extra": sorted(extra)}


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_models(folder)
    (folder / "spawn").mkdir()
    run_ranks(write_references, 1, folder / "spawn", str(folder), str(folder))
    return folder


def write_models(folder: Path) -> None:
    """The models that layouts are compared on."""
    write_model(folder / "experts", num_hidden_layers=NUM_LAYERS)
    write_family(folder / "dense", "Qwen2ForCausalLM", num_hidden_layers=NUM_LAYERS, tie_word_embeddings=True)
    write_family(folder / "GLM", "Glm4MoeForCausalLM", num_hidden_layers=NUM_LAYERS, use_qk_norm=True)
    write_family(folder / "DeepSeek", "DeepseekV3ForCausalLM", num_hidden_layers=NUM_LAYERS - 1)
    options = {"num_hidden_layers": NUM_LAYERS, "initializer_range": 0.2}  # wider ones round by 9e-6
    write_family(folder / "Qwen2-MoE", "Qwen2MoeForCausalLM", **options)
    write_family(
        folder / "MiniMax", "MiniMaxM2ForCausalLM", num_hidden_layers=NUM_LAYERS, initializer_range=0.15
    )
    write_family(folder / "gpt-oss", "GptOssForCausalLM", num_hidden_layers=NUM_LAYERS, initializer_range=0.15)
    options["initializer_range"] = 0.1
    write_family(folder / "Qwen3-Next", "Qwen3NextForCausalLM", **options)
    write_family(folder / "Qwen3_5", "Qwen3_5MoeForCausalLM", **options)
    write_model(folder / "uneven", num_hidden_layers=NUM_LAYERS + 2)


def _measured(
    reference: Path, world_size: int, at_most: int | None, of_others: int | None
) -> list[tuple[Case, dict[str, Any]]]:
    chosen = list(cases(world_size, at_most, of_others))
    folder = reference / f"spawn{world_size}.{at_most}.{of_others}"
    folder.mkdir()
    plain = [astuple(case) for case in chosen]
    models = str(reference)
    results = run_ranks(compare_all, world_size, folder, models, models, plain)[0]
    return list(zip(chosen, results, strict=True))


@pytest.fixture(scope="session")
def measured(reference: Path, request: pytest.FixtureRequest) -> Iterator[Measure]:
    """Measures all cases of a world size once, and writes them to a file if an option requests it."""
    known: dict[tuple[int, int | None, int | None], list[tuple[Case, dict[str, Any]]]] = {}

    def measure(
        world_size: int, at_most: int | None, of_others: int | None
    ) -> list[tuple[Case, dict[str, Any]]]:
        choice = world_size, at_most, of_others
        if choice not in known:
            known[choice] = _measured(reference, *choice)
        return known[choice]

    yield measure
    if request.config.getoption("--write-layouts"):
        write_table([(case, worst_of(result["errors"])) for of in known.values() for case, result in of])


def _problems(measured: list[tuple[Case, dict[str, Any]]]) -> Iterator[str]:
    for case, result in measured:
        if result.get("models left"):
            yield f"{result['models left']} models, and with them process groups, outlive their actors"
        if result["faults"] or result["extra"]:
            yield f"{case.name} {dict(case.features)}: {result['faults']} {result['extra']}"
        for kind, errors in result["errors"].items():
            for name, error in errors.items():
                if not error.value <= error.limit < COARSEST:
                    yield f"{case.name} {dict(case.features)}: {kind} {name} {error}"


@pytest.mark.parametrize(
    ("world_size", "at_most", "of_others"),
    [
        (2, None, 1),
        (4, 1, 0),
        pytest.param(2, 0, None, marks=pytest.mark.slow),
        pytest.param(4, None, 0, marks=pytest.mark.slow),
        pytest.param(4, 0, None, marks=pytest.mark.slow),
        pytest.param(8, None, None, marks=pytest.mark.slow),
    ],
)
def test_every_layout_equals_one_process(
    measured: Measure, world_size: int, at_most: int | None, of_others: int | None
) -> None:
    assert list(_problems(measured(world_size, at_most, of_others))) == []


def test_admitted_layouts_equal_the_tested_layouts() -> None:
    tested = {
        kind_of(Layout.of(ParallelConfig.model_validate(parallel), world_size))
        for layouts in (LAYOUTS, DENSE_LAYOUTS)
        for world_size, of_size in layouts.items()
        for parallel in of_size.values()
    }
    assert tested == PROVEN


def test_the_readme_has_a_row_for_each_layout() -> None:
    known = {(name, str(size)) for size in LAYOUTS for name in layouts_of(size)}
    later = {(name, str(size)) for size, named in UNEVEN_LAYOUTS.items() for name in named}
    assert known - later <= set(rows()) <= known, "run: make layouts"
