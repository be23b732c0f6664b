"""The plan's figures against what Megatron, its optimizer and autograd really hold.

The loss runs as operators, whose CPU implementation makes float32 copies of the logits that GPU kernels do not
make. PyTorch's dispatch modes see an operator's inputs and results alone, so the measured peak is without them.
"""

import ctypes
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import padded_vocab
from megatron_dppo.checks import model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.plan.activations import Assumptions, LayerModel
from megatron_dppo.plan.job import Job, Machine
from megatron_dppo.plan.memory import memory_of
from megatron_dppo.plan.stages import (
    FLOAT,
    ROWS,
    StageActivations,
    optimizer_bytes,
    rank_states,
    stage_activations,
    stage_parts,
)
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import ModelRouting
from tests.support import varlen_reference
from tests.support.ranks import run_ranks
from tests.support.tiny import write_model
from tests.support.tiny_families import write_family

# A layout is one line here: processes, and [parallel].
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one process": (1, {}),
    "expert 2": (2, {"expert": 2}),
    "tensor 2": (2, {"tensor": 2, "expert_tensor": 1}),
    "context 2": (2, {"context": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2 in four chunks": (2, {"pipeline": 2, "virtual_pipeline": 2}),
}
SIZES: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=24,
    num_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=256,
)


def _recompute(granularity: str, **keys: Any) -> dict[str, Any]:
    return {f"recompute_{key}": value for key, value in {"granularity": granularity, **keys}.items()}


@dataclass(frozen=True)
class Case:
    """One run to measure."""

    sizes: dict[str, Any] = field(default_factory=dict)
    architecture: str = "Qwen3MoeForCausalLM"
    dtype: str = "bfloat16"
    megatron: dict[str, Any] = field(default_factory=dict)
    is_distributed: bool = True
    num_sequences: int = 4
    sequence_tokens: int = 96
    num_microbatches: int = 1
    samples_sharing: int = 1  # sequences with the same first `prompt_tokens`
    prompt_tokens: int = 64
    algorithm: dict[str, Any] = field(default_factory=dict)
    is_flash: bool = False  # attention as GPUs compute it
    lora: dict[str, Any] = field(default_factory=dict)


WIDE = {"vocab_size": 5003}  # the loss decides the peak
CHUNK_BYTES = 128 * 5003 * 2  # a third of the tokens in bfloat16
LOSSES = {
    "large vocabulary": Case(WIDE),
    "logits in chunks": Case(WIDE, algorithm={"logits_chunk_bytes": CHUNK_BYTES}),
    "chunks of float32 logits": Case(
        WIDE, algorithm={"logits_chunk_bytes": 2 * CHUNK_BYTES, "logits_dtype": "float32"}
    ),
    "float32 logits at once": Case(WIDE, algorithm={"logits_dtype": "float32"}),
    "two micro-batches": Case(WIDE, num_microbatches=2),
    "all logits": Case(WIDE, algorithm={"loss_from": "logits"}),
}
FLASH = {
    "flash attention": Case(is_flash=True),
    "flash attention, wide": Case(
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32}, is_flash=True
    ),
    "flash attention recomputed": Case(megatron=_recompute("selective", modules=["core_attn"]), is_flash=True),
}
SHARED = {
    "shared prompts": Case(num_sequences=6, samples_sharing=3, is_flash=True),
    "shared prompts, wide": Case(
        WIDE | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32},
        num_sequences=8,
        samples_sharing=8,
        prompt_tokens=40,
        is_flash=True,
    ),
    "shared prompts, all logits": Case(
        WIDE, num_sequences=4, samples_sharing=2, algorithm={"loss_from": "logits"}, is_flash=True
    ),
    "shared prompts recomputed": Case(
        num_sequences=6,
        samples_sharing=3,
        megatron=_recompute("selective", modules=["core_attn"]),
        is_flash=True,
    ),
}
ADAPTERS = {
    "adapters": Case(lora={"rank": 8}),
    "adapters of some linears, plain optimizer": Case(
        lora={"rank": 16, "targets": ("q_proj", "o_proj")}, is_distributed=False
    ),
}
SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
}
LATENT: dict[str, Any] = SIGMOID | {
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LATENTS = {
    "latent queries and keys": Case(LATENT, "DeepseekV3ForCausalLM", is_flash=True),
    "latent keys, recomputed": Case(
        LATENT | {"q_lora_rank": None, "v_head_dim": 32},
        "DeepseekV3ForCausalLM",
        megatron=_recompute("selective", modules=["core_attn"]),
        is_flash=True,
    ),
}
HYBRID: dict[str, Any] = {
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 96,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}
HYBRIDS = {
    "recurrent states, flash attention": Case(
        HYBRID, "Qwen3NextForCausalLM", is_flash=True, sequence_tokens=128
    ),
    "recurrent states": Case(HYBRID, "Qwen3NextForCausalLM", sequence_tokens=128),
    "recurrent states, recomputed": Case(
        HYBRID,
        "Qwen3NextForCausalLM",
        megatron=_recompute("selective", modules=["core_attn", "moe"]),
        sequence_tokens=128,
    ),
}
OF_FAMILIES = {
    **HYBRIDS,
    **LATENTS,
    "latent attention without flash": Case(LATENT | {"v_head_dim": 32}, "Glm4MoeLiteForCausalLM"),
    "shared experts, half rotated": Case(SIGMOID, "Glm4MoeForCausalLM"),
    "sinks, windows and biased experts": Case(
        {"num_local_experts": 8, "sliding_window": 32, "intermediate_size": 48},
        "GptOssForCausalLM",
        is_flash=True,
    ),
    "norms over all heads": Case({"num_local_experts": 8, "rotary_dim": 8}, "MiniMaxM2ForCausalLM"),
}
# Recomputed layers that are narrow inside keep their inputs alone, so that what stages pass on is a large part.
_NARROW = {"hidden_size": 512, "moe_intermediate_size": 8, "num_attention_heads": 2, "head_dim": 8}
IN_STAGES = {
    "stages": Case(num_microbatches=4),
    "stages of recomputed layers": Case(
        _NARROW | {"num_experts_per_tok": 2, "num_hidden_layers": 8},
        num_microbatches=8,
        megatron=_recompute("full", method="uniform", num_layers=1),
    ),
}
CASES = {
    **LOSSES,
    **IN_STAGES,
    **FLASH,
    **SHARED,
    **ADAPTERS,
    **OF_FAMILIES,
    "experts": Case(),
    "experts in float32, plain optimizer": Case(dtype="float32", is_distributed=False),
    "dense layers among them": Case({"mlp_only_layers": [0, 1, 3]}),
    "wide attention": Case({"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32}),
    "wide experts, plain optimizer": Case(
        {"moe_intermediate_size": 256, "num_experts_per_tok": 4}, is_distributed=False
    ),
    "few long sequences": Case(num_sequences=2, sequence_tokens=200),
    "full recompute": Case(megatron=_recompute("full", method="uniform", num_layers=1)),
    "full recompute of pairs": Case(megatron=_recompute("full", method="uniform", num_layers=2)),
    "full recompute of some": Case(megatron=_recompute("full", method="block", num_layers=2)),
    "attention recomputed": Case(megatron=_recompute("selective", modules=["core_attn"])),
    "feed-forwards recomputed": Case(
        {"mlp_only_layers": [1]}, megatron=_recompute("selective", modules=["moe", "mlp"])
    ),
    "tied embeddings": Case({"tie_word_embeddings": True}),
    "all logits in float32": Case(WIDE, dtype="float32", algorithm={"loss_from": "logits"}),
    "all logits, full recompute": Case(
        megatron=_recompute("full", method="uniform", num_layers=1), algorithm={"loss_from": "logits"}
    ),
}
# With tensor parallelism the loss is measured, and not what layers of a float32 or recomputed model keep. With
# context parallelism flash attention is: the masks of padded batches, which half precision on a GPU never has,
# are not counted.
MEASURED = {
    "one process": {name: case for name, case in CASES.items() if name not in IN_STAGES},
    "expert 2": {name: case for name, case in CASES.items() if not (case.is_flash or name in IN_STAGES)},
    "tensor 2": {**LOSSES, **ADAPTERS, **OF_FAMILIES, "shared prompts, wide": SHARED["shared prompts, wide"]},
    "context 2": {**FLASH, **LATENTS},
    "pipeline 2": IN_STAGES,
    "pipeline 2 in four chunks": IN_STAGES,
}


def _each(is_in: Callable[[Case], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("layout_name", "case"),
        [(layout, case) for layout, cases in MEASURED.items() for case in cases if is_in(CASES[case])],
        ids=lambda name: name.replace(" ", "-"),
    )


each_case = _each(lambda case: True)
each_without_adapters = _each(lambda case: not case.lora)  # whose own activations are not counted


def config_of(model: str, parallel: dict[str, int], case: Case) -> Config:
    """The run's config."""
    is_alone = case.samples_sharing == 1 and "context" not in parallel  # random sequences may begin alike
    return Config.model_validate(
        {
            "model": {"load": model, "dtype": case.dtype},
            "parallel": parallel | ({"share_prefixes": False} if is_alone else {}),
            "optimizer": {"distributed": case.is_distributed},
            "rollout": {"routing_replay": "replay"},
            "algorithm": case.algorithm,
            "megatron": case.megatron,
            "lora": case.lora,
        }
    )


def microbatch(case: Case, routing: ModelRouting) -> Any:
    """One micro-batch whose routes give every expert as many tokens."""
    from megatron_dppo.types import Microbatch, RoutedExperts

    sizes, layers = SIZES | case.sizes, routing.layer_numbers
    num_tokens = case.num_sequences * case.sequence_tokens
    choices = torch.arange(num_tokens * routing.top_k).remainder(routing.num_experts).view(num_tokens, 1, -1)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, sizes["vocab_size"], (num_tokens,), generator=generator)
    if case.samples_sharing > 1:
        first = torch.arange(num_tokens).view(-1, case.samples_sharing, case.sequence_tokens)
        first[:, :, : case.prompt_tokens] = first[:, :1, : case.prompt_tokens].clone()
        choices = choices[first.flatten()]
        own = first[:, :, case.prompt_tokens]  # no two responses begin alike
        tokens[own.flatten()] = torch.arange(own.numel())
        tokens = tokens[first.flatten()]
    positions = torch.arange(case.sequence_tokens).repeat(case.num_sequences)
    return Microbatch(
        tokens=tokens,
        position_ids=positions,
        targets=torch.randint(0, sizes["vocab_size"], (num_tokens,), generator=generator),
        cu_seqlens=torch.arange(0, num_tokens + 1, case.sequence_tokens, dtype=torch.int32),
        loss_mask=positions >= case.prompt_tokens * (case.samples_sharing > 1),
        rollout_log_probs=-torch.rand(num_tokens, generator=generator),
        advantages=torch.randn(num_tokens, generator=generator),
        token_weights=torch.ones(num_tokens),
        routed_experts=RoutedExperts(
            choices.expand(-1, len(layers), -1).to(torch.uint8), layers, routing.num_experts
        ),
    )


def measure(runtime: Runtime, model: str, parallel: dict[str, int], case: Case) -> dict[str, int]:
    """On one rank: bytes of what the actor holds."""
    from megatron.core import parallel_state

    from megatron_dppo.actor import forward
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.mcore.fixes import prime_adam_states
    from megatron_dppo.models.packed_attention import PaddedBatches, VarlenSequences
    from megatron_dppo.types import TrainBatch
    from tests.distributed.memory_probes import LiveBytes, SavedBytes

    varlen_reference.install()
    forward.attention_form = lambda *_: VarlenSequences if case.is_flash else PaddedBatches
    actor = Actor(config_of(model, parallel, case), runtime)
    prime_adam_states(actor.optimizer)
    wrapped: list[Any] = list(actor._ddp)
    buffers = [buffer for ddp in wrapped for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    assert actor.routing is not None
    one = microbatch(case, actor.routing)
    num = case.num_microbatches
    batch = TrainBatch((one,) * num, num * one.tokens.numel(), num * case.num_sequences)
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    saved, live = SavedBytes(parameters), LiveBytes()
    with saved.watching():
        actor.accumulate_gradients(batch, is_first=False)
    with live:
        step = actor.accumulate_gradients(batch, is_first=False)
    assert not step.faults, step.faults
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "parameters": sum(storages.values()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": _optimizer_bytes(actor.optimizer, set(storages)),
        "shares_prefixes": actor.shares_prefixes,
        "saved": saved.peak,
        "live": live.peak,
    }


def _optimizer_bytes(optimizer: Any, model_storages: set[int]) -> int:
    """Adam's moments and master parameters, without its step counters."""
    total = 0
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = member.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                is_master = parameter.untyped_storage().data_ptr() not in model_storages
                moments = [inner.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
                total += sum(t.nbytes for t in (*moments, *([parameter] * is_master)))
    return total


def measure_all(
    runtime: Runtime, models: dict[str, str], parallel: dict[str, int]
) -> dict[str, dict[str, int]]:
    """Some cases in one spawn."""
    return {name: measure(runtime, model, parallel, CASES[name]) for name, model in models.items()}


def write_case(folder: Path, case: Case) -> Path:
    """The model of a case."""
    sizes = SIZES | case.sizes
    if case.architecture == "Qwen3MoeForCausalLM":
        return write_model(folder, **sizes)
    return write_family(folder, case.architecture, **sizes)


Found = tuple[dict[str, str], list[dict[str, dict[str, int]]]]


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """By a layout's name: model folders, and what each rank measured in each case."""

    @cache
    def of_layout(layout_name: str) -> Found:
        world_size, parallel = LAYOUTS[layout_name]
        folder = tmp_path_factory.mktemp("plan")
        models = {
            name: str(write_case(folder / f"model{index}", case))
            for index, (name, case) in enumerate(MEASURED[layout_name].items())
        }
        return models, run_ranks(measure_all, world_size, folder, models, parallel)

    return of_layout


def job_of(layout_name: str, model: str, case: Case) -> tuple[Job, Layout]:
    """The same run as the planner sees it: balanced experts, no padding in attention, a CPU's layers."""
    world_size, parallel = LAYOUTS[layout_name]
    config = config_of(model, parallel, case)
    machine = Machine(world_size, gpu_bytes=1 << 34)
    job = Job.of(config, model_facts(config, world_size), machine, Assumptions(1.0, 1.0))
    num_shared = (case.samples_sharing - 1) * case.prompt_tokens * (case.num_sequences // case.samples_sharing)
    workload = replace(
        job.workload,
        max_tokens=case.num_sequences * case.sequence_tokens - num_shared,
        sequence_tokens=case.sequence_tokens,
        prompt_tokens=case.prompt_tokens,
        samples_sharing=case.samples_sharing,
        samples_per_step=case.num_sequences * case.num_microbatches * job.layout.data,
    )
    options = replace(job.options, layer_spec="torch-cpu")
    without_losses = replace(job.assumptions, fragmentation=0.0)
    return replace(job, workload=workload, options=options, assumptions=without_losses), job.layout


@each_case
def test_prefixes_are_shared_where_the_plan_says(measured: Any, layout_name: str, case: str) -> None:
    models, ranks = measured(layout_name)
    job, _ = job_of(layout_name, models[case], CASES[case])
    assert job.shares_prefixes == (CASES[case].samples_sharing > 1)
    assert {rank[case]["shares_prefixes"] for rank in ranks} == {job.shares_prefixes}


@each_case
def test_weights_and_gradients_are_exact(measured: Any, layout_name: str, case: str) -> None:
    models, ranks = measured(layout_name)
    job, layout = job_of(layout_name, models[case], CASES[case])
    for found in (rank[case] for rank in ranks):
        states = rank_states(job, stage_parts(job, layout)[found["stage"]])
        assert (states.parameters, states.gradients) == (found["parameters"], found["gradients"])


@each_case
def test_optimizer_states_are_exact(measured: Any, layout_name: str, case: str) -> None:
    """A shard counts the padding of Megatron's buffers too; over all ranks the rest is exact."""
    models, ranks = measured(layout_name)
    job, layout = job_of(layout_name, models[case], CASES[case])
    per_element = optimizer_bytes(1, job.workload.dtype_bytes)
    total = 0.0
    for found in (rank[case] for rank in ranks):
        part = stage_parts(job, layout)[found["stage"]]
        padding = part.buffer - part.dense.own - part.expert.own
        assert 0 <= rank_states(job, part).optimizer - found["optimizer"] <= padding * per_element
        if CASES[case].is_distributed:
            total += part.dense.own / part.dense.sharers + part.expert.own / part.expert.sharers
        else:
            total += part.dense.own + part.expert.own
    assert sum(rank[case]["optimizer"] for rank in ranks) == total * per_element


def _saved_by_head(job: Job, layout: Layout, kept: StageActivations) -> int:
    """The final norm's and the logits; or the gradient by hidden states, and not these."""
    num_tokens, hidden = job.workload.microbatch_tokens(layout.data), job.shape.sizes.hidden_size
    columns = padded_vocab(job.shape, layout) // layout.tensor
    if job.config.algorithm.loss_from == "logits":
        rows = job.workload.microbatch_rows(layout.data)
        return kept.head + rows * (columns * job.workload.dtype_bytes + ROWS * FLOAT)
    others = num_tokens - num_tokens // layout.tensor  # tokens that other tensor ranks hold
    if job.workload.tree(layout.data).is_shared:  # the gradient is by the hidden states of the rows
        others += job.workload.microbatch_rows(layout.data) - num_tokens
    return kept.head + others * hidden * job.workload.dtype_bytes


@each_without_adapters
def test_activations_kept_for_backward_are_within_3_percent(
    measured: Any, layout_name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerModel, "is_flash", CASES[case].is_flash)
    models, ranks = measured(layout_name)
    job, layout = job_of(layout_name, models[case], CASES[case])
    for found in (rank[case] for rank in ranks):
        kept = stage_activations(job, layout, stage_parts(job, layout)[found["stage"]])
        predicted = kept.held + max(_saved_by_head(job, layout, kept), kept.again)
        assert predicted == pytest.approx(found["saved"], rel=0.03), asdict(kept)


@each_without_adapters
def test_the_printed_sum_of_a_stage_is_within_15_percent_of_all_live_tensors(
    measured: Any, layout_name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger of the moments in which the trainer computes, with all components that are its tensors.

    Both sides are without the weights, gradients and moments that were measured, so that 15 % is of what
    depends on tokens.
    """
    monkeypatch.setattr(LayerModel, "is_flash", CASES[case].is_flash)
    models, ranks = measured(layout_name)
    job, layout = job_of(layout_name, models[case], CASES[case])
    stages = memory_of(job, layout).stages
    for found in (rank[case] for rank in ranks):
        of_stage = stages[found["stage"]]
        others = ("reserve", "engine weights", "engine cache")
        sums = {
            name: of_stage.total(name) - sum(of_stage.moments[name].get(other, 0) for other in others)
            for name in ("loss", "backward")
        }
        states = found["parameters"] + found["gradients"] + found["optimizer"]
        actual = found["live"] + found["optimizer"] - states
        assert max(sums.values()) - states == pytest.approx(actual, rel=0.15), of_stage


# Large enough that copies stand out of a process's other memory: 9 M parameters, of which 1 M in one tensor.
_LARGE = SIZES | dict(vocab_size=4096, hidden_size=256, moe_intermediate_size=256, intermediate_size=512)


def saves(
    runtime: Runtime, model: str, folder: str, changes: dict[str, Any]
) -> dict[str, tuple[int, int, float]]:
    """Peak resident bytes that a save adds, bytes that the plan predicts, and seconds that training pauses."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.run.checkpoints import Checkpoints
    from megatron_dppo.run.state import RunPoint
    from megatron_dppo.types import RunState
    from tests.support.peak_memory import peak_memory

    tables = {"model": {"load": model, "dtype": "float32"}, "data": {"reward": "math"}, **changes}
    config = Config.model_validate(tables)
    actor = Actor(config, runtime)
    job = Job.of(config, model_facts(config, runtime.world_size), Machine(runtime.world_size, 1 << 40))
    (part,) = stage_parts(job, job.layout)
    planned = rank_states(job, part)
    found: dict[str, tuple[int, int, float]] = {}
    for is_asynchronous, num_bytes in ((True, planned.checkpoint), (False, planned.checkpoint_pieces)):
        options = config.checkpoint.model_copy(update={"asynchronous": is_asynchronous, "reserve_gib": 0.0})
        own = Path(folder) / str(is_asynchronous)
        runtime.on_main(own.mkdir)
        checkpoints = Checkpoints(own, options, config.model.load, runtime)
        for step in range(2):  # the first allocates what stays
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what an earlier save freed would be used again
            with peak_memory() as above:
                pause = checkpoints.save(actor, RunPoint(RunState(0, step, 0, {}), 0, ""))
                checkpoints.wait()
        found[str(is_asynchronous)] = (above[0], num_bytes, pause)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "parallel"), [(1, {}), (2, {}), (2, {"expert": 2})], ids=["one process", "data 2", "expert 2"]
)
def test_the_memory_of_a_save_is_what_is_counted(
    tmp_path: Path, num_ranks: int, parallel: dict[str, int]
) -> None:
    """Within a quarter and 16 MiB of other memory; a synchronous save holds copies of views on a CPU alone."""
    write_model(tmp_path / "model", **_LARGE)
    inputs = (str(tmp_path / "model"), str(tmp_path), {"parallel": parallel})
    ranks = run_ranks(saves, num_ranks, tmp_path, *inputs)
    above, counted = (max(rank["True"][i] for rank in ranks) for i in (0, 1))
    assert counted > 60 << 20
    assert abs(above - counted) < counted / 4 + (16 << 20), (above, counted)
    if num_ranks == 2 and not parallel:  # data parallelism divides it
        assert above < 0.75 * 16 * 9_000_000
