"""What to change so that a run fits, or to make it faster: each suggestion is tried before it is made."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from megatron_dppo.actor.layout import Layout
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.engine import SGLANG_MEMORY_FRACTION, engine_memory
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import RESERVE_BYTES
from megatron_dppo.plan.memory import Memory, memory_of
from megatron_dppo.plan.options import FULL, Options, Recompute
from megatron_dppo.plan.search import HEADROOM, Found, fits, fits_hosts, has_headroom, propose
from megatron_dppo.plan.units import counted, in_gib

TOKENS_STEP = 1024  # micro-batches are suggested in multiples of it
WORTH_SAYING = 1.05  # a faster layout or option is mentioned from this factor on
MAX_GPUS_TRIED = 256
SMALLEST_FRACTION = 0.3  # of the GPU, that SGLang is still useful with

Change = tuple[str, Job]  # something to do, as an imperative without a full stop, and the job that comes of it
Changer = Callable[[Job, Layout], Change | None]  # none where it does not apply


def advise(job: Job, memory: Memory | None, found: Found, vary: Sequence[Options]) -> list[str]:
    """Sentences, most useful first.

    Args:
        job: What was configured.
        memory: Of the configured layout; none where it cannot be laid out.
        found: The layouts that fit.
        vary: The options that they were chosen from.
    """
    if memory is not None and fits(job, memory):
        return [_when_it_fits(job, memory, found)]
    if memory is not None and memory.peak <= job.machine.gpu_bytes and not fits_hosts(job, memory):
        return [_when_the_host_is_too_small(job, memory)]
    remedy = None if memory is None else _remedy(job, memory.layout)
    if remedy is not None:
        return [remedy]
    if found.proposals:
        return ["No change of options makes this layout fit; take one of the layouts below."]
    return [_more_gpus(job, vary)]


def _more_gpus(job: Job, vary: Sequence[Options]) -> str:
    """The fewest GPUs, doubled and doubled again, on which some layout fits; with another engine if need be."""
    none = f"Nothing fits on {counted(job.machine.num_gpus, 'GPU')}"
    for num_gpus in (job.machine.num_gpus * factor for factor in (1, 2, 4, 8)):
        larger = replace(job, machine=replace(job.machine, num_gpus=num_gpus))
        plain: Change = f"use {num_gpus} GPUs (--gpus {num_gpus})", larger
        for change in (plain, _wider_engine(larger), _smaller_engine(larger), _other_engine(larger)):
            if num_gpus > MAX_GPUS_TRIED or change is None or change[1] == job:
                continue
            if propose(change[1], vary).proposals:
                more = "" if num_gpus == job.machine.num_gpus or change is plain else f"{plain[0]} and "
                return f"{none}: {more}{change[0]}, and some layouts do."
    return f"{none}: shorten sequences and micro-batches, or use GPUs with more memory."


def _when_it_fits(job: Job, memory: Memory, found: Found) -> str:
    own = step_time(job, memory.layout).total
    if job.options.recompute.granularity != "none":
        eager = _with_recompute(job, Recompute())
        without, faster = memory_of(eager, memory.layout), own / step_time(eager, memory.layout).total
        if fits(job, without) and faster >= WORTH_SAYING:
            return (
                f"It fits without recompute too, {in_gib(without.peak)} GiB, about {faster:.2f} times as fast: "
                "remove megatron.recompute_granularity."
            )
    better = [p for p in found.proposals if p.time.total * WORTH_SAYING <= own]
    admitted = [p for p in better if p.is_admitted]
    if not better:
        return "Nothing to change: no layout here is estimated to be clearly faster."
    best = (admitted or better)[0]
    number = found.proposals.index(best) + 1
    later = "" if best.is_admitted else ", once the program admits it"
    return f"Layout {number} below is estimated to be {own / best.time.total:.2f} times as fast{later}."


def _when_the_host_is_too_small(job: Job, memory: Memory) -> str:
    synchronous = job.config.checkpoint.model_copy(update={"asynchronous": False})
    changed = replace(job, config=job.config.model_copy(update={"checkpoint": synchronous}))
    if fits(changed, memory_of(changed, memory.layout)):
        return "Write checkpoints without a copy on the host: --set checkpoint.asynchronous=false."
    name, num_bytes = max(memory.host.per_rank.items(), key=lambda item: item[1])
    return (
        f"The host is too small; most of it is {name}, {in_gib(num_bytes)} GiB for each rank. Use more nodes."
    )


def _remedy(job: Job, layout: Layout) -> str | None:
    """The fewest changes after which the layout fits, of equally few the fastest; offload as last resort."""
    today: list[Changer] = [
        _recompute_all,
        _chunk_logits,
        _park,
        _smaller_engine,
        _wider_engine,
        _other_engine,
    ]
    return _fewest_changes(job, layout, today) or _fewest_changes(job, layout, [*today, _offload])


def _fewest_changes(job: Job, layout: Layout, changes: Sequence[Changer]) -> str | None:
    for count in range(1, len(changes) + 2):
        working: list[tuple[float, str]] = []
        for chosen in combinations(changes, count):
            working.extend(_tried(job, layout, chosen))
        for chosen in combinations(changes, count - 1):
            working.extend(_tried(job, layout, (*chosen, _smaller_microbatch)))
        if working:
            return min(working)[1]
    return None


def _tried(job: Job, layout: Layout, chosen: Sequence[Changer]) -> Iterator[tuple[float, str]]:
    """(Seconds of a step, sentence) where all the changes apply and make the layout fit."""
    texts: list[str] = []
    for change in chosen:
        changed = change(job, layout)
        if changed is None:
            return
        texts.append(changed[0])
        job = changed[1]
    memory = memory_of(job, layout)
    if has_headroom(job, memory):
        sentence = " and ".join(texts)
        yield (
            step_time(job, layout).total,
            f"{sentence[0].upper()}{sentence[1:]}: {in_gib(memory.peak)} GiB then.",
        )


def _recompute_all(job: Job, layout: Layout) -> Change | None:
    if job.options.recompute.granularity == "full":
        return None
    keys = " ".join(f"--set megatron.{key}={value}" for key, value in FULL.keys().items())
    return f"recompute activations ({keys})", _with_recompute(job, FULL)


def _chunk_logits(job: Job, layout: Layout) -> Change | None:
    if job.config.algorithm.loss_from == "hidden_states":
        return None
    algorithm = job.config.algorithm.model_copy(update={"loss_from": "hidden_states"})
    changed = replace(job, config=job.config.model_copy(update={"algorithm": algorithm}))
    return "make logits of some tokens at a time (--set algorithm.loss_from=hidden_states)", changed


def _park(job: Job, layout: Layout) -> Change | None:
    if job.options.offload_optimizer or job.config.optimizer.offload:
        return None
    optimizer = job.config.optimizer.model_copy(update={"offload": True})
    changed = replace(job, config=job.config.model_copy(update={"optimizer": optimizer}))
    return "keep optimizer states on the host between updates (--set optimizer.offload=true)", changed


def _offload(job: Job, layout: Layout) -> Change | None:
    if job.options.offload_optimizer:
        return None
    options = replace(job.options, offload_optimizer=True)
    return "keep Adam on the host (--offload-optimizer; the trainer cannot yet)", replace(job, options=options)


def _smaller_engine(job: Job, layout: Layout | None = None) -> Change | None:
    """SGLang with the largest share of the GPU that leaves room in a rollout."""
    if job.config.rollout.engine != "sglang" or job.is_engine_separate:
        return None
    own = job.config.sglang.get("mem_fraction_static", SGLANG_MEMORY_FRACTION)
    for percent in range(90, int(SMALLEST_FRACTION * 100) - 1, -5):
        if percent / 100 >= own:
            continue
        table = job.config.sglang | {"mem_fraction_static": percent / 100}
        changed = replace(job, config=job.config.model_copy(update={"sglang": table}))
        engine = engine_memory(changed.config, job.shape, Layout(world_size=1), job.machine, is_separate=False)
        taken = RESERVE_BYTES + engine.weights + engine.cache + engine.workspace
        has_cache = engine.cached_tokens >= job.workload.sequence_tokens
        if has_cache and taken <= (1 - HEADROOM) * job.machine.gpu_bytes:
            return f"lower the engine's share (--set sglang.mem_fraction_static={percent / 100:g})", changed
    return None


def _wider_engine(job: Job, layout: Layout | None = None) -> Change | None:
    """SGLang's weights split over all GPUs of a node."""
    size = min(job.machine.num_gpus, job.machine.gpus_per_node)
    if (
        job.config.rollout.engine != "sglang"
        or job.is_engine_separate
        or job.config.sglang.get("tp_size") == size
    ):
        return None
    table = job.config.sglang | {"tp_size": size}
    changed = replace(job, config=job.config.model_copy(update={"sglang": table}))
    return f"split the engine over more GPUs (--set sglang.tp_size={size})", changed


def _other_engine(job: Job, layout: Layout | None = None) -> Change | None:
    if job.config.rollout.engine != "transformers":
        return None
    rollout = job.config.rollout.model_copy(update={"engine": "sglang"})
    table = job.config.sglang | {"tp_size": min(job.machine.num_gpus, job.machine.gpus_per_node)}
    changed = replace(job, config=job.config.model_copy(update={"rollout": rollout, "sglang": table}))
    text = f"let SGLang roll out (--set rollout.engine=sglang --set sglang.tp_size={table['tp_size']})"
    return text, changed


def _smaller_microbatch(job: Job, layout: Layout) -> Change | None:
    """The largest micro-batch that fits, if one of whole sequences does."""
    fewest = -(-job.workload.sequence_tokens // TOKENS_STEP)
    low, high = fewest, (job.workload.max_tokens - 1) // TOKENS_STEP
    best: Job | None = None
    while low <= high:
        middle = (low + high) // 2
        changed = replace(job, workload=replace(job.workload, max_tokens=middle * TOKENS_STEP))
        if has_headroom(changed, memory_of(changed, layout)):
            best, low = changed, middle + 1
        else:
            high = middle - 1
    if best is None:
        return None
    tokens = best.workload.max_tokens
    return f"use smaller micro-batches (--set parallel.max_tokens_per_microbatch={tokens})", best


def _with_recompute(job: Job, recompute: Recompute) -> Job:
    return replace(job, options=replace(job.options, recompute=recompute))
