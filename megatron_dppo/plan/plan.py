"""Plans a run: whether `train` accepts the configured layout, whether it fits, and which layouts do."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_dppo.checks import Facts, model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.job import COUNTED_MODULES, Job, Machine
from megatron_dppo.plan.memory import Memory, memory_of
from megatron_dppo.plan.search import (
    SIZES,
    Found,
    Proposal,
    conclusion_of,
    fewest_gpus,
    fits,
    has_headroom,
    numbers_to_try,
    propose,
    remedy_of,
    why_not_enough,
)
from megatron_dppo.plan.serving import ServerLoad, server_load
from megatron_dppo.plan.units import Settings, format_count, in_gib, in_seconds

_NOT_COUNTED = (
    *("cpu_offloading", "fine_grained_activation_offloading", "distribute_saved_activations"),
    *("deallocate_pipeline_outputs", "cross_entropy_loss_fusion"),
)
"""Fields of TransformerConfig that affect a rank's memory, and are not part of the estimate."""
_RECOMPUTE_KEYS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
WORTH_SAYING = 1.05  # a faster run without recompute is mentioned from this factor on


@dataclass(frozen=True)
class Advice:
    """A suggestion, and the settings that follow it."""

    text: str
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Fewest:
    """Result of the search over numbers of GPUs.

    Attributes:
        num_gpus: Smallest sufficient number of GPUs; if no number is sufficient, the largest that was tried.
        proposal: Fastest layout on these GPUs, if they are sufficient.
        why_not: Sentence that explains why no number is sufficient.
    """

    num_gpus: int
    proposal: Proposal | None = None
    why_not: str = ""


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
    advice = () if memory is None else tuple(advise(job, memory))
    is_enough = found.proposals or (memory is not None and fits(job, memory))
    fewest = None if is_enough else _fewest(job)
    return Plan(job, tuple(problems), memory, time, found, fewest, advice, notes, load)


def _fewest(job: Job) -> Fewest:
    found, most = fewest_gpus(job), numbers_to_try(job.machine)[-1]
    return Fewest(most, why_not=why_not_enough(job.on(most))) if found is None else Fewest(*found)


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


def advise(job: Job, memory: Memory) -> Iterator[Advice]:
    """Yield settings that a run pays for and does not need, or those that decide what does not fit."""
    if not fits(job, memory):
        if remedy := remedy_of(job, memory):
            yield Advice(remedy)
        return
    yield from _unneeded_offload(job)
    if job.options.recompute.granularity != "none":
        table = {key: value for key, value in job.config.megatron.items() if key not in _RECOMPUTE_KEYS}
        eager = job.having({"megatron": table})
        without, faster = memory_of(eager, memory.layout), _seconds(job) / _seconds(eager)
        if fits(eager, without) and faster >= WORTH_SAYING:
            given = [key for key in _RECOMPUTE_KEYS if key in job.config.megatron]
            yield Advice(
                f"It fits without recompute too, {in_gib(without.peak)} GiB, about {faster:.2f} times as fast. "
                f"To take it away: {' '.join(f'--set megatron.{key}=none' for key in given)}"
            )


def _seconds(job: Job) -> float:
    return step_time(job, job.layout).total


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
    try:
        job = Job.assumed(config, facts)
        found = [advice.text for advice in _unneeded_offload(job)]
    except ConfigError:  # of a key that has its own rule
        return []
    gpus = job.machine.assumed_text
    return [f"{text} Assumed: {gpus}; megatron-dppo plan takes other sizes." for text in found]
