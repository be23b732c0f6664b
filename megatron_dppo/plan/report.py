"""Formats a plan as text and as JSON. Bytes in JSON, GiB (2^30 bytes) in the text."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron_dppo.architectures.megatron_options import may_use_transformer_engine
from megatron_dppo.config.schema import AlgorithmConfig
from megatron_dppo.plan import job as figures
from megatron_dppo.plan.cost import StepTime
from megatron_dppo.plan.gpu_rates import ASSUMED, GpuRates
from megatron_dppo.plan.memory import COMPONENTS, MOMENTS, Memory, server_memory
from megatron_dppo.plan.plan import Advice, Fewest, Plan
from megatron_dppo.plan.search import HEADROOM, NODES, Proposal, cache_shortage
from megatron_dppo.plan.serving import ServerLoad, lines_of
from megatron_dppo.plan.units import as_overrides, format_count, in_billions, in_gib, in_seconds, layout_text

LOSS_KEYS = ("loss_from", "logits_chunk_bytes", "logits_dtype")  # of [algorithm]
_NAME, _NUMBER = 24, 10  # column widths
WIDTH = 100  # of the text


def as_text(plan: Plan, num_proposals: int = 5) -> str:
    """Format the complete plan as text, with at most `num_proposals` proposals."""
    blocks = [list(_conclusion(plan)), list(_heading(plan))]
    if plan.memory is not None:
        blocks += [list(_gpu_table(plan.memory)), list(_host_table(plan.memory))]
    if plan.load is not None:
        blocks.append(list(lines_of(plan.load)))
    blocks.append(list(_shortage(plan)))
    blocks.append([f"not counted: {note}" for note in plan.notes])
    blocks += [list(_proposals(plan, num_proposals)), list(_advice(plan.advice)), list(_fewest(plan))]
    has_times = bool(plan.found and plan.found.proposals) or bool(plan.fewest and plan.fewest.proposal)
    if plan.time is None and has_times:
        blocks.append(list(_sources_of_times(plan.job.machine.rates)))
    return "\n\n".join("\n".join(map(wrap_line, lines)) for lines in blocks if lines) + "\n"


def wrap_line(line: str) -> str:
    """Break a line that is too long, never between --set and its value, and indent the rest."""
    if len(line) <= WIDTH:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    parts = textwrap.wrap(
        line.replace("--set ", "--set\0"),
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts).replace("\0", " ")


def _conclusion(plan: Plan) -> Iterator[str]:
    yield plan.conclusion
    yield from (f"- {problem}" for problem in plan.problems)
    if plan.time is not None:
        steps, seconds = plan.job.config.algorithm.steps_per_rollout, plan.time.total
        of_rollout = f"{format_count(steps, 'step')} to a rollout, {in_seconds(steps * seconds)}"
        yield f"A gradient step: about {in_seconds(seconds)}; {of_rollout}. Sampling is not estimated."
        if anchor := plan.time.anchor:
            share = f"{in_seconds(anchor)}, {anchor / seconds:.0%} of it"
            yield f"Recomputing log-probs takes {share}; algorithm.anchor = 'rollout' has no such forward."
        yield from _sources_of_times(plan.job.machine.rates)


def _sources_of_times(rates: GpuRates) -> Iterator[str]:
    """Yield the assumptions of the times: what was measured, where, and what was not."""
    nvlink, network = figures.NVLINK_BYTES_PER_S, figures.NETWORK_BYTES_PER_S
    share, links = figures.LINK_EFFICIENCY, f"{nvlink / 1e9:.0f} GB/s in a node and {network / 1e9:.0f} between"
    texts = {
        "layer_flops_per_s": f"layers at {rates.layer_flops_per_s / 1e12:.0f} TFLOP/s",
        "output_flops_per_s": f"the output layer at {rates.output_flops_per_s / 1e12:.0f} TFLOP/s",
        "update_parameters_per_s": f"updates of {rates.update_parameters_per_s / 1e9:.1f} billion parameters/s",
        "host_bytes_per_s": f"{rates.host_bytes_per_s / 1e9:.0f} GB/s to the host",
    }
    yield "Times are estimates, of responses of full length. No run on several GPUs has confirmed them."
    for each in (rates, ASSUMED):
        names = [name for name in each.measured if name in texts]
        if names:
            measured = ", ".join(texts.pop(name) for name in names)
            yield f"Measured on one {each.device} ({each.file}): {measured}."
    rest = [*texts.values(), f"transfers at {share:.0%} of {links}"]
    yield f"Assumed: {', '.join(rest)}."


def _heading(plan: Plan) -> Iterator[str]:
    job, machine = plan.job, plan.job.machine
    shape, sizes = job.shape, job.shape.sizes
    experts = f" ({in_billions(shape.num_active_parameters)} active)" if sizes.moe_layers else ""
    total = in_billions(shape.num_parameters)
    yield f"{sizes.architecture}, {total} parameters{experts}, {job.config.model.dtype}"
    host = "" if machine.host_bytes is None else f", hosts of {in_gib(machine.host_bytes)} GiB"
    gpus = format_count(machine.num_gpus, "GPU")
    yield f"{gpus}, {machine.ranks_per_node} to a node, {in_gib(machine.gpu_bytes)} GiB each{host}"
    if plan.memory is not None:
        yield f"layout: {layout_text(plan.memory.layout)}; {plan.memory.options}"
        yield f"loss: {_loss_text(plan.job.config.algorithm)}"
        tokens, num = plan.memory.microbatch_tokens, plan.memory.num_microbatches
        yield f"a gradient step: {num} micro-batches of up to {tokens} tokens on each data-parallel rank"
        tree = job.workload.tree(plan.memory.layout.data)
        if job.shares_prefixes:
            share = tree.num_tokens / tree.num_keys
            sharing = f"{tree.num_samples} samples to one, {share:.0%} of their tokens forwarded"
            condition = " if the layers are torch's" * may_use_transformer_engine(job.config, sizes)
            yield f"shared prompts{condition}: {sharing}"
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
        residue = in_gib(memory.engine.residue)
        yield "Engine and trainer take turns: in a rollout nothing of the trainer is on the GPU, in training"
        yield f"{residue} GiB of the engine. The engine's cache holds {memory.engine.cached_tokens} tokens."


def _shortage(plan: Plan) -> Iterator[str]:
    """Yield that servers with their own GPUs, of the same size, cannot hold a sequence."""
    job, memory = plan.job, plan.memory
    if memory is not None and memory.engine.is_separate and job.config.sglang.get("device") != "cpu":
        server = server_memory(job.config, job.shape, job.machine)
        if not server.holds(job.workload.sequence_tokens):
            size = in_gib(job.machine.gpu_bytes)
            yield f"Servers on GPUs of {size} GiB do not serve this: the {cache_shortage(job, server)}"


def _host_table(memory: Memory) -> Iterator[str]:
    yield "Host memory of a rank, GiB:"
    for name, num_bytes in memory.host.per_rank.items():
        yield _row(name, [in_gib(num_bytes, 2)])
    yield _row(f"a node, {format_count(memory.host.ranks_per_node, 'rank')}", [in_gib(memory.host.per_node, 2)])


def _row(name: str, values: Sequence[str]) -> str:
    return f"  {name:<{_NAME}}" + "".join(f"{value:>{_NUMBER}}" for value in values)


def _proposals(plan: Plan, num_proposals: int) -> Iterator[str]:
    found, gpus = plan.found, format_count(plan.job.machine.num_gpus, "GPU")
    if found is None:
        yield "No layout helps before this is solved; then plan again."
        return
    if not found.num_admitted:
        yield f"train admits no layout on {gpus} with the rest of the config."
        return
    admitted = f"{format_count(found.num_admitted, 'layout')} that train admits on {gpus}"
    if not found.proposals:
        yield f"Of {admitted}, none fits with {HEADROOM:.0%} of a GPU to spare."
        return
    yield f"Of {admitted}, {len(found.proposals)} fit. Fastest first, with what to set:"
    yield from _table(found.proposals[:num_proposals])
    if len(found.proposals) > num_proposals:
        yield f"       and {len(found.proposals) - num_proposals} more (--proposals)"


def _table(proposals: Sequence[Proposal]) -> Iterator[str]:
    yield f"  {'':>4}{'a step':>8}{'GPU':>8}{'node':>8}  (GiB)"
    for place, proposal in enumerate(proposals, 1):
        memory = f"{in_gib(proposal.memory.peak):>8}{in_gib(proposal.memory.host.per_node):>8}"
        overrides = as_overrides(proposal.settings) or "as configured"
        yield f"  {place:>3}.{in_seconds(proposal.time.total):>8}{memory}  {overrides}"


def _fewest(plan: Plan) -> Iterator[str]:
    fewest, machine = plan.fewest, plan.job.machine
    if fewest is None:
        return
    tried = f"tried: 1 to {machine.gpus_per_node}, then {', '.join(map(str, NODES[:4]))} ... {NODES[-1]} nodes"
    if fewest.proposal is None:
        nothing = f"Nothing fits on up to {format_count(fewest.num_gpus, 'GPU')} ({tried}). {fewest.why_not}"
        yield nothing.rstrip()
        return
    enough = "is the fewest that is enough" if fewest.num_gpus == 1 else "are the fewest that are enough"
    yield f"{format_count(fewest.num_gpus, 'GPU')} {enough} ({tried}), with:"
    yield from _table([fewest.proposal])


def _advice(advice: Sequence[Advice]) -> Iterator[str]:
    for each in advice:
        yield f"Advice: {each.text}"
        if each.settings:
            yield f"  {as_overrides(each.settings)}"


def as_json(plan: Plan, num_proposals: int = 5) -> dict[str, Any]:
    """Return the plan as plain values with stable keys."""
    job, shape = plan.job, plan.job.shape
    proposals = () if plan.found is None else plan.found.proposals
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
            "reserve_bytes": figures.RESERVE_BYTES,
            "engine_residue_bytes": job.machine.engine_residue_bytes,
            "nvlink_bytes_per_s": figures.NVLINK_BYTES_PER_S,
            "network_bytes_per_s": figures.NETWORK_BYTES_PER_S,
            "link_efficiency": figures.LINK_EFFICIENCY,
        },
        "fits": plan.fits,
        "conclusion": plan.conclusion,
        "problems": [asdict(problem) for problem in plan.problems],
        "advice": [{"text": each.text, "set": dict(each.settings)} for each in plan.advice],
        "not_counted": list(plan.notes),
        "configured": None if plan.memory is None else _memory_json(plan.memory),
        "configured_step_s": None if plan.time is None else _time_json(plan.time),
        "steps_per_rollout": job.config.algorithm.steps_per_rollout,
        "server_load": None if plan.load is None else _load_json(plan.load),
        "proposals": [_proposal_json(proposal) for proposal in proposals[:num_proposals]],
        "num_admitted_layouts": 0 if plan.found is None else plan.found.num_admitted,
        "num_fitting_layouts": len(proposals),
        "fewest_gpus": None if plan.fewest is None else _fewest_json(plan.fewest),
    }


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "layout": asdict(memory.layout),
        "recompute": asdict(memory.options.recompute),
        "num_microbatches": memory.num_microbatches,
        "microbatch_tokens": memory.microbatch_tokens,
        "samples_sharing": memory.samples_sharing,
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


def _load_json(load: ServerLoad) -> dict[str, Any]:
    derived = {"tokens_per_request": load.tokens_per_request, "mean_tokens": load.mean_tokens}
    return {**asdict(load), **derived, "retracts": load.retracts}


def _time_json(time: StepTime) -> dict[str, float]:
    return {**asdict(time), "total": time.total}


def _proposal_json(proposal: Proposal) -> dict[str, Any]:
    return {
        "set": dict(proposal.settings),
        "layout": asdict(proposal.layout),
        "recompute": asdict(proposal.memory.options.recompute),
        "step_s": _time_json(proposal.time),
        "peak_bytes": proposal.memory.peak,
        "worst_moment": proposal.memory.worst.worst_moment,
        "node_bytes": proposal.memory.host.per_node,
    }


def _fewest_json(fewest: Fewest) -> dict[str, Any]:
    return {
        "num_gpus": fewest.num_gpus if fewest.proposal is not None else None,
        "tried_up_to": fewest.num_gpus if fewest.proposal is None else None,
        "proposal": None if fewest.proposal is None else _proposal_json(fewest.proposal),
        "why_not": fewest.why_not,
    }
