"""Plans a run: whether `train` accepts the configured layout, whether it fits, and what to change.

Each change is planned before it is advised.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from megatron_dppo.architectures.layout import is_admitted
from megatron_dppo.checks import Facts, model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.job import ASSUMED_GPU_BYTES, COUNTED_MODULES, FULL, Job, Machine, recompute_problems
from megatron_dppo.plan.memory import SGLANG_MEMORY_FRACTION, Memory, memory_of
from megatron_dppo.plan.search import (
    SIZES,
    Fewest,
    Found,
    conclusion_of,
    engine_alone,
    fewest_gpus,
    fits,
    fits_hosts,
    has_headroom,
    has_room,
    keys_of,
    numbers_to_try,
    propose,
)
from megatron_dppo.plan.serving import ServerLoad, server_load
from megatron_dppo.plan.units import Settings, format_count, in_gib, in_seconds

_NOT_COUNTED = (
    *("cpu_offloading", "fine_grained_activation_offloading", "distribute_saved_activations"),
    *("deallocate_pipeline_outputs", "cross_entropy_loss_fusion"),
)
"""Fields of TransformerConfig that affect a rank's memory, and are not part of the estimate."""
_RECOMPUTE_KEYS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
TOKENS_STEP = 1024  # micro-batches are suggested in multiples of it
WORTH_SAYING = 1.05  # a faster layout or option is mentioned from this factor on
SMALLEST_FRACTION = 0.3  # of the GPU, that SGLang is still useful with
MAX_CHANGES = 4  # in one suggestion


@dataclass(frozen=True)
class Advice:
    """A suggestion, and the settings that follow it."""

    text: str
    settings: Settings = field(default_factory=dict)


Change = tuple[str, Settings]  # an imperative without a full stop, and its settings
Changer = Callable[[Job], Change | None]  # returns None if the change does not apply


@dataclass(frozen=True)
class Plan:
    """Result of `megatron-dppo plan`.

    Attributes:
        job: Planned job.
        problems: Problems for which `train` refuses the job; then `memory` and `time` are None.
        memory: Memory of the configured layout.
        time: Estimated time of one gradient step.
        found: Layouts of the given GPUs that fit. None if a search would not help, because every layout has the
            same problems.
        fewest: Smallest sufficient number of GPUs, if neither the configured layout nor one in `found` fits.
        advice: Suggested changes.
        notes: Settings that affect memory and are not counted.
        load: Load of an SGLang server; None without a server that holds a sequence.
    """

    job: Job
    problems: tuple[Problem, ...]
    memory: Memory | None
    time: StepTime | None
    found: Found | None
    fewest: Fewest | None
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    load: ServerLoad | None = None

    @property
    def fits(self) -> bool:
        """Whether `train` accepts the configured layout, and GPUs and known hosts are large enough."""
        return self.memory is not None and fits(self.job, self.memory)

    @property
    def conclusion(self) -> str:
        """One sentence: whether the layout is accepted and fits, and the largest component."""
        if self.memory is None:
            gpus = format_count(self.job.machine.num_gpus, "GPU")
            return f"Refused: train does not start with this config on {gpus}."
        return conclusion_of(self.job, self.memory)


def make_plan(config: Config, machine: Machine, response_tokens: float | None = None) -> Plan:
    """Plan a run, reading only config.json of `model.load`.

    Args:
        config: Config of the run.
        machine: GPUs of the trainer.
        response_tokens: Mean length of a response, for the load of SGLang's servers; None assumes some.

    Raises:
        ConfigError: The model's parameters are not known, or an option is invalid.
    """
    job = Job.of(config, model_facts(config, machine.num_gpus), machine)
    problems, notes = job.problems, tuple(_not_counted(job))
    if _is_refused_anyway(job, problems):
        return Plan(job, tuple(problems), None, None, None, None, (), notes)
    memory = time = load = None
    if not problems:
        memory, time = memory_of(job, job.layout), step_time(job, job.layout)
        load = server_load(config, job.shape, machine, response_tokens)
    found = propose(job)
    advice = [] if memory is None else advise(job, memory, found)
    plan = Plan(job, tuple(problems), memory, time, found, None, tuple(advice), notes, load)
    return plan if plan.fits or found.proposals else replace(plan, fewest=_fewest(job, advice))


def _fewest(job: Job, advice: Sequence[Advice]) -> Fewest:
    """Search the smallest number of GPUs; try another engine only if none fits and there is no advice."""
    fewest = fewest_gpus(job)
    other = fewest_with_other_engine(job) if fewest.proposal is None and not advice else None
    return other or fewest


def _is_refused_anyway(job: Job, problems: Sequence[Problem]) -> bool:
    """Whether a key also fails without parallelism, on few and on many GPUs, so that no layout helps."""
    unsplit = job.having({f"parallel.{size}": 1 for size in SIZES})
    few, *_, many = numbers_to_try(job.machine)
    at_fault = [problems, unsplit.on(few).problems, unsplit.on(many).problems]
    return bool(set.intersection(*({problem.where for problem in each} for each in at_fault)))


def _not_counted(job: Job) -> Iterator[str]:
    config = job.config
    for key in _NOT_COUNTED:
        if config.megatron.get(key):
            yield f"megatron.{key} = {config.megatron[key]!r}"
    if job.options.recompute.granularity == "selective":
        for module in job.options.recompute.modules:
            if module not in COUNTED_MODULES:
                yield f"megatron.recompute_modules: {module!r} is taken to save nothing"


def advise(job: Job, memory: Memory, found: Found) -> list[Advice]:
    """Return the advice for a layout that `train` accepts."""
    if fits(job, memory):
        unneeded = list(_unneeded_offload(job))
        return [
            *unneeded,
            _when_it_fits(job, memory, found, "Keep the layout" if unneeded else "Nothing to change"),
        ]
    remedy = _remedy(job)
    if remedy is not None:
        return [remedy]
    if memory.peak <= job.machine.gpu_bytes and not fits_hosts(job, memory):
        name, num_bytes = max(memory.host.per_rank.items(), key=lambda item: item[1])
        most = f"most of it is {name}, {in_gib(num_bytes)} GiB for each rank"
        helps = f"Change {keys}, or use more nodes" if (keys := keys_of(name)) else "Use more nodes"
        return [Advice(f"The host is too small; {most}. {helps}.")]
    if found.proposals:
        return [Advice("No change of options makes this layout fit; take one of the layouts above.")]
    return []


def _unneeded_offload(job: Job) -> Iterator[Advice]:
    """Yield a suggestion if optimizer states fit on the GPU, and are configured to be on the host."""
    if not job.config.optimizer.offload:
        return
    settings = {"optimizer.offload": False}
    kept, seconds = job.having(settings), step_time(job, job.layout).optimizer
    memory = memory_of(kept, kept.layout)
    if has_headroom(kept, memory):
        of_rollout = in_seconds(job.config.algorithm.steps_per_rollout * seconds)
        fits_too = f"{in_gib(memory.peak)} of {in_gib(job.machine.gpu_bytes)} GiB without it"
        cost = f"It takes {in_seconds(seconds)} of a gradient step, {of_rollout} of a rollout"
        yield Advice(f"optimizer.offload is not needed: {fits_too}. {cost}.", settings)


def offload_remarks(config: Config, facts: Facts) -> list[str]:
    """Return a note if `optimizer.offload` costs time and is not needed on GPUs of `ASSUMED_GPU_BYTES`."""
    num_gpus = facts.world_size
    is_known = not isinstance(facts.sizes, Problem) and is_admitted(config.parallel, num_gpus, facts.sizes)
    if not config.optimizer.offload or not is_known:
        return []
    try:
        job = Job.of(config, facts, Machine(num_gpus, ASSUMED_GPU_BYTES))
        found = [advice.text for advice in _unneeded_offload(job)]
    except ConfigError:  # of a key that has its own rule
        return []
    gpus = f"{format_count(num_gpus, 'GPU')} of {ASSUMED_GPU_BYTES / 1e9:g} GB"
    return [f"{text} Assumed: {gpus}; megatron-dppo plan takes other sizes." for text in found]


def fewest_with_other_engine(job: Job) -> Fewest | None:
    """Return the smallest sufficient number of GPUs after a change of the engine, if there is one."""
    enough: list[Fewest] = []
    for change in (_larger_engine, _smaller_engine, _wider_engine, _other_engine):
        changed = change(job)
        if changed is None:
            continue
        condition, settings = changed
        fewest = fewest_gpus(job.having(settings))
        if fewest.proposal is not None:
            proposal = replace(fewest.proposal, settings={**settings, **fewest.proposal.settings})
            enough.append(replace(fewest, proposal=proposal, condition=condition))
    return min(enough, key=lambda each: each.num_gpus) if enough else None


def _when_it_fits(job: Job, memory: Memory, found: Found, otherwise: str) -> Advice:
    own = step_time(job, memory.layout).total
    if job.options.recompute.granularity != "none":
        table = {key: value for key, value in job.config.megatron.items() if key not in _RECOMPUTE_KEYS}
        eager = job.having({"megatron": table})
        without, faster = memory_of(eager, memory.layout), own / step_time(eager, memory.layout).total
        if fits(eager, without) and faster >= WORTH_SAYING:
            given = [key for key in _RECOMPUTE_KEYS if key in job.config.megatron]
            return Advice(
                f"It fits without recompute too, {in_gib(without.peak)} GiB, about {faster:.2f} times as fast. "
                f"To take it away: {' '.join(f'--set megatron.{key}=none' for key in given)}"
            )
    better = [each for each in found.proposals if each.time.total * WORTH_SAYING <= own]
    if not better:
        return Advice(f"{otherwise}: no layout here is estimated to be clearly faster.")
    faster = own / better[0].time.total
    return Advice(f"Layout 1 is estimated to be {faster:.2f} times as fast.", better[0].settings)


def _remedy(job: Job) -> Advice | None:
    """Return the fewest changes that make the configured layout fit, preferring the fastest."""
    changes: list[Changer] = [
        *(_recompute_all, _chunk_logits, _park, _larger_engine, _smaller_engine, _wider_engine, _other_engine),
        _synchronous_checkpoints,
    ]
    for count in range(1, MAX_CHANGES + 1):
        working: list[tuple[float, str, Settings]] = []
        for chosen in combinations(changes, count):
            working.extend(_try_changes(job, chosen))
        for chosen in combinations(changes, count - 1):
            working.extend(_try_changes(job, (*chosen, _smaller_microbatch)))
        if working:
            _, text, settings = min(working, key=lambda each: round(each[0], 2))  # of equals the first
            return Advice(text, settings)
    return None


def _try_changes(job: Job, chosen: Sequence[Changer]) -> Iterator[tuple[float, str, Settings]]:
    """Yield (seconds of a step, sentence, settings) if all the changes apply and make the layout fit."""
    texts: list[str] = []
    settings: dict[str, object] = {}
    for change in chosen:
        changed = change(job)
        if changed is None:
            return
        texts.append(changed[0])
        settings |= changed[1]
        job = job.having(changed[1])
    memory = memory_of(job, job.layout)
    if has_headroom(job, memory) and not job.problems:
        seconds = step_time(job, job.layout).total
        node = "" if job.machine.host_bytes is None else f" and {in_gib(memory.host.per_node)} GiB of a node"
        then = f"{in_gib(memory.peak)} GiB{node} then, about {in_seconds(seconds)} for a gradient step"
        yield seconds, f"{_sentence(' and '.join(texts))}: {then}.", settings


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _recompute_all(job: Job) -> Change | None:
    table = {**job.config.megatron, **FULL.keys()}
    if job.options.recompute.granularity == "full" or recompute_problems(table):
        return None
    return "recompute activations", {f"megatron.{key}": value for key, value in FULL.keys().items()}


def _chunk_logits(job: Job) -> Change | None:
    if job.config.algorithm.loss_from == "hidden_states":
        return None
    return "make logits of some tokens at a time", {"algorithm.loss_from": "hidden_states"}


def _park(job: Job) -> Change | None:
    if job.config.optimizer.offload:
        return None
    return "keep optimizer states on the host between updates", {"optimizer.offload": True}


def _synchronous_checkpoints(job: Job) -> Change | None:
    if job.machine.host_bytes is None or not job.config.checkpoint.asynchronous:
        return None
    return "write checkpoints without a copy on the host", {"checkpoint.asynchronous": False}


def _smaller_engine(job: Job) -> Change | None:
    """Propose SGLang with the largest smaller share of the GPU that leaves room in a rollout."""
    percents = range(90, int(SMALLEST_FRACTION * 100) - 1, -5)
    return _other_share(job, percents, operator.lt, "lower the engine's share of the GPU")


def _larger_engine(job: Job) -> Change | None:
    """Propose SGLang with the next larger share of the GPU that gives its cache room for a sequence."""
    if job.has_colocated_sglang and engine_alone(job).holds(job.workload.sequence_tokens):
        return None
    percents = range(int(SMALLEST_FRACTION * 100), 100, 5)
    return _other_share(job, percents, operator.gt, "raise the engine's share of the GPU")


def _other_share(
    job: Job, percents: range, is_change: Callable[[float, float], bool], text: str
) -> Change | None:
    """Return the first of these shares of the GPU that changes the engine's and gives it room."""
    own = job.config.sglang.get("mem_fraction_static", SGLANG_MEMORY_FRACTION)
    for percent in percents if job.has_colocated_sglang else ():
        settings = {"sglang.mem_fraction_static": percent / 100}
        changed = job.having(settings)
        if is_change(percent / 100, own) and has_room(changed, engine_alone(changed)):
            return text, settings
    return None


def _wider_engine(job: Job) -> Change | None:
    """Propose SGLang's weights split over all GPUs of a node."""
    size = min(job.machine.num_gpus, job.machine.gpus_per_node)
    if not job.has_colocated_sglang or job.config.sglang.get("tp_size", 1) == size:
        return None
    return f"split the engine over {format_count(size, 'GPU')}", {"sglang.tp_size": size}


def _other_engine(job: Job) -> Change | None:
    if job.config.rollout.engine != "transformers":
        return None
    size = min(job.machine.num_gpus, job.machine.gpus_per_node)
    settings: Settings = {
        "rollout.engine": "sglang",
        "rollout.sglang.colocated": True,
        "rollout.sglang.weight_sync": "tensor",
        "sglang.tp_size": size,
    }
    return "let SGLang roll out, on the same GPUs", settings


def _smaller_microbatch(job: Job) -> Change | None:
    """Propose the largest micro-batch of complete sequences that fits, if there is one."""
    key = "parallel.max_tokens_per_microbatch"
    low, high = -(-job.workload.sequence_tokens // TOKENS_STEP), (job.workload.max_tokens - 1) // TOKENS_STEP
    best: int | None = None
    while low <= high:
        middle = (low + high) // 2
        changed = job.having({key: middle * TOKENS_STEP})
        if has_headroom(changed, memory_of(changed, changed.layout)):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return None if best is None else ("use smaller micro-batches", {key: best * TOKENS_STEP})
