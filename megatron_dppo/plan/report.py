"""A plan as text for people, and as JSON for machines. Bytes in JSON, GiB (2^30 bytes) in the text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron_dppo.actor.layout import Layout
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.plan.machine import ENGINE_RESIDUE_BYTES, FRAGMENTATION, RESERVE_BYTES
from megatron_dppo.plan.memory import Memory
from megatron_dppo.plan.moments import COMPONENTS, MOMENTS
from megatron_dppo.plan.options import Options
from megatron_dppo.plan.plan import Plan
from megatron_dppo.plan.search import Proposal
from megatron_dppo.plan.units import counted, in_billions, in_gib

LOSS_KEYS = ("loss_from", "logits_chunk_bytes", "logits_dtype")  # of [algorithm]
_NAME, _NUMBER = 24, 10  # column widths


def as_text(plan: Plan, num_proposals: int = 5) -> str:
    """The whole plan; at most so many proposals of each kind."""
    blocks = [list(_heading(plan))]
    if plan.memory is not None:
        blocks += [list(_gpu_table(plan.memory)), list(_host_table(plan.memory))]
    blocks.append([f"Verdict: {plan.verdict}", *(f"Advice: {line}" for line in plan.advice)])
    blocks.append([f"not counted: {note}" for note in plan.notes])
    if plan.problems:
        blocks.append([f"megatron-dppo train refuses this layout: {p}" for p in plan.problems])
    blocks.append(list(_proposals(plan, num_proposals)))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def layout_text(layout: Layout) -> str:
    """The sizes above 1, as in "tensor 4, expert 8, data 2"."""
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "virtual_pipeline": layout.virtual_pipeline}
    sizes |= {"context": layout.context, "expert": layout.expert, "data": layout.data}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.expert_tensor != layout.tensor:
        parts.append(f"expert_tensor {layout.expert_tensor}")
    return ", ".join(parts) or "one process"


def _heading(plan: Plan) -> Iterator[str]:
    job, machine = plan.job, plan.job.machine
    shape, sizes = job.shape, job.shape.sizes
    experts = f" ({in_billions(shape.num_active_parameters)} active)" if sizes.moe_layers else ""
    total = in_billions(shape.num_parameters)
    yield f"{sizes.architecture}, {total} parameters{experts}, {job.config.model.dtype}"
    host = "" if machine.host_bytes is None else f", hosts of {in_gib(machine.host_bytes)} GiB"
    gpus = counted(machine.num_gpus, "GPU")
    yield f"{gpus}, {machine.ranks_per_node} to a node, {in_gib(machine.gpu_bytes)} GiB each{host}"
    if plan.memory is not None:
        yield f"layout: {layout_text(plan.memory.layout)}; {plan.memory.options}"
        yield f"loss: {_loss_text(plan.job.config.algorithm)}"
        tokens, num = plan.memory.microbatch_tokens, plan.memory.num_microbatches
        yield f"a gradient step: {num} micro-batches of up to {tokens} tokens on each data-parallel rank"
        yield f"engine: {plan.memory.engine.text}"


def _loss_text(options: AlgorithmConfig) -> str:
    if options.loss_from == "logits":
        return "from the logits of a whole micro-batch"
    wide = " in float32" if options.logits_dtype == "float32" else ""
    return f"from hidden states, logits{wide} made {in_gib(options.logits_chunk_bytes, 2)} GiB at a time"


def _gpu_table(memory: Memory) -> Iterator[str]:
    worst = memory.worst
    where = f", of pipeline stage {worst.stage}" if len(memory.stages) > 1 else ""
    yield f"GPU memory of the worst rank{where}, GiB at each moment:"
    yield _row("", MOMENTS)
    for name in COMPONENTS:
        values = [worst.moments[moment].get(name, 0) for moment in MOMENTS]
        if any(values):
            yield _row(name, [in_gib(value, 2) if value else "-" for value in values])
    yield _row("total", [in_gib(worst.total(moment), 2) for moment in MOMENTS])
    if len(memory.stages) > 1:
        yield "peak of each pipeline stage: " + "  ".join(in_gib(stage.peak) for stage in memory.stages)
    if not (memory.engine.is_resident or memory.engine.is_separate):
        yield "Engine and trainer take turns on the GPU: the peak is the higher of the two, not their sum."
        yield f"The engine's cache holds {memory.engine.cached_tokens} tokens."


def _host_table(memory: Memory) -> Iterator[str]:
    yield "Host memory of a rank, GiB:"
    for name, num_bytes in memory.host.per_rank.items():
        yield _row(name, [in_gib(num_bytes, 2)])
    yield _row(f"a node, {counted(memory.host.ranks_per_node, 'rank')}", [in_gib(memory.host.per_node, 2)])


def _row(name: str, values: Sequence[str]) -> str:
    return f"  {name:<{_NAME}}" + "".join(f"{value:>{_NUMBER}}" for value in values)


def _proposals(plan: Plan, num_proposals: int) -> Iterator[str]:
    found, number = plan.found, plan.job.machine.num_gpus
    if not found.proposals:
        layouts = counted(found.num_divisible, "layout")
        yield f"Of {layouts} that divide the model over {counted(number, 'GPU')}, none fits."
        return
    base = min(proposal.time.total for proposal in found.proposals)
    own = "" if plan.time is None else f"; the configured one: {plan.time.total / base:.2f}"
    yield f"Layouts for {counted(number, 'GPU')} that fit, fastest first (GiB; relative time of a step{own}):"
    yield f"  {'':>4}{'time':>6}{'GPU':>8}{'node':>8}  layout; options"
    for is_admitted in (True, False):
        numbered = [(n, p) for n, p in enumerate(found.proposals, 1) if p.is_admitted == is_admitted]
        for place, proposal in numbered[:num_proposals]:
            yield _proposal(place, proposal, base)
        if len(numbered) > num_proposals:
            yield f"       and {len(numbered) - num_proposals} more"
    if not all(proposal.is_admitted for proposal in found.proposals):
        yield "[not yet: ...] is what the trainer refuses today: an unproven layout, an option it lacks."
    if found.num_without_prompts:
        left_out = counted(found.num_without_prompts, "layout")
        yield f"Left out: {left_out} whose data-parallel ranks do not divide the prompts of a gradient step."


def _proposal(place: int, proposal: Proposal, base: float) -> str:
    later = f"  [not yet: {', '.join(proposal.missing)}]" if proposal.missing else ""
    memory, time = proposal.memory, proposal.time.total / base
    return (
        f"  {place:>3}.{time:>6.2f}{in_gib(memory.peak):>8}{in_gib(memory.host.per_node):>8}  "
        f"{layout_text(proposal.layout)}; {proposal.options}{later}"
    )


def as_json(plan: Plan, num_proposals: int = 5) -> dict[str, Any]:
    """The plan as plain values; keys are stable."""
    job, shape = plan.job, plan.job.shape
    admitted = [p for p in plan.found.proposals if p.is_admitted][:num_proposals]
    others = [p for p in plan.found.proposals if not p.is_admitted][:num_proposals]
    return {
        "model": {
            "architecture": shape.sizes.architecture,
            "parameters": shape.num_parameters,
            "active_parameters": shape.num_active_parameters,
        },
        "machine": asdict(job.machine),
        "loss": {key: getattr(job.config.algorithm, key) for key in LOSS_KEYS},
        "assumptions": {
            **asdict(job.assumptions),
            "fragmentation": FRAGMENTATION,
            "reserve_bytes": RESERVE_BYTES,
            "engine_residue_bytes": ENGINE_RESIDUE_BYTES,
        },
        "fits": plan.fits,
        "verdict": plan.verdict,
        "advice": list(plan.advice),
        "not_counted": list(plan.notes),
        "problems": [asdict(problem) for problem in plan.problems],
        "configured": None if plan.memory is None else _memory_json(plan.memory),
        "configured_step_s": None if plan.time is None else asdict(plan.time),
        "proposals": [_proposal_json(proposal) for proposal in (*admitted, *others)],
        "num_divisible_layouts": plan.found.num_divisible,
        "num_fitting_layouts": len(plan.found.proposals),
    }


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "layout": asdict(memory.layout),
        "options": _options_json(memory.options),
        "num_microbatches": memory.num_microbatches,
        "microbatch_tokens": memory.microbatch_tokens,
        "peak_bytes": memory.peak,
        "worst_stage": memory.worst.stage,
        "worst_moment": memory.worst.worst_moment,
        "stages": [
            {"stage": stage.stage, "peak_bytes": stage.peak, "moments": stage.moments}
            for stage in memory.stages
        ],
        "engine": asdict(memory.engine),
        "host": {"per_rank": memory.host.per_rank, "node_bytes": memory.host.per_node},
    }


def _options_json(options: Options) -> dict[str, Any]:
    return asdict(options) | {"recompute": asdict(options.recompute)}


def _proposal_json(proposal: Proposal) -> dict[str, Any]:
    return {
        "layout": asdict(proposal.layout),
        "options": _options_json(proposal.options),
        "megatron": proposal.options.recompute.keys(),
        "is_admitted": proposal.is_admitted,
        "missing": list(proposal.missing),
        "step_s": asdict(proposal.time) | {"total": proposal.time.total},
        "peak_bytes": proposal.memory.peak,
        "worst_moment": proposal.memory.worst.worst_moment,
        "node_bytes": proposal.memory.host.per_node,
    }
