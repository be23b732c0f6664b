"""Plans a run: whether `train` accepts the configured layout, whether it fits, and other layouts that fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_dppo.checks import model_facts
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.plan.advice import Advice, advise, fewest_with_other_engine
from megatron_dppo.plan.conclusion import conclusion_of
from megatron_dppo.plan.cost import StepTime, step_time
from megatron_dppo.plan.fewest import SIZES, Fewest, fewest_gpus, numbers_to_try
from megatron_dppo.plan.job import Job
from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.memory import Memory, memory_of
from megatron_dppo.plan.options import COUNTED_MODULES
from megatron_dppo.plan.search import Found, fits, propose
from megatron_dppo.plan.units import counted


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
    """

    job: Job
    problems: tuple[Problem, ...]
    memory: Memory | None
    time: StepTime | None
    found: Found | None
    fewest: Fewest | None
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether `train` accepts the configured layout, and GPUs and known hosts are large enough."""
        return self.memory is not None and fits(self.job, self.memory)

    @property
    def conclusion(self) -> str:
        """One sentence: whether the layout is accepted and fits, and the largest component."""
        if self.memory is None:
            gpus = counted(self.job.machine.num_gpus, "GPU")
            return f"Refused: train does not start with this config on {gpus}."
        return conclusion_of(self.job, self.memory)


def make_plan(config: Config, machine: Machine) -> Plan:
    """Plan a run, reading only config.json of `model.load`.

    Args:
        config: Config of the run.
        machine: Available GPUs and hosts.

    Raises:
        ConfigError: The model's parameters are not known, or an option is invalid.
    """
    job = Job.of(config, model_facts(config, machine.num_gpus), machine)
    problems, notes = job.problems, tuple(_not_counted(job))
    if _is_refused_anyway(job, problems):
        return Plan(job, tuple(problems), None, None, None, None, (), notes)
    memory = time = None
    if not problems:
        memory, time = memory_of(job, job.layout), step_time(job, job.layout)
    found = propose(job)
    advice = [] if memory is None else advise(job, memory, found)
    plan = Plan(job, tuple(problems), memory, time, found, None, tuple(advice), notes)
    return plan if plan.fits or found.proposals else replace(plan, fewest=_fewest(job, advice))


def _fewest(job: Job, advice: Sequence[Advice]) -> Fewest:
    """Search the smallest number of GPUs; try another engine only if none fits and there is no advice."""
    fewest = fewest_gpus(job)
    other = fewest_with_other_engine(job) if fewest.proposal is None and not advice else None
    return other or fewest


def _is_refused_anyway(job: Job, problems: Sequence[Problem]) -> bool:
    """Whether a key is also at fault without splits, on few and on many GPUs, so that no layout helps."""
    unsplit = job.having({f"parallel.{size}": 1 for size in SIZES})
    few, *_, many = numbers_to_try(job.machine)
    at_fault = [problems, unsplit.on(few).problems, unsplit.on(many).problems]
    return bool(set.intersection(*({problem.where for problem in each} for each in at_fault)))


_NOT_COUNTED = (
    *("cpu_offloading", "fine_grained_activation_offloading", "distribute_saved_activations"),
    *("deallocate_pipeline_outputs", "cross_entropy_loss_fusion"),
)
"""Fields of TransformerConfig that affect a rank's memory, and are not part of the estimate."""


def _not_counted(job: Job) -> Iterator[str]:
    config = job.config
    for key in _NOT_COUNTED:
        if config.megatron.get(key):
            yield f"megatron.{key} = {config.megatron[key]!r}"
    if job.options.recompute.granularity == "selective":
        for module in job.options.recompute.modules:
            if module not in COUNTED_MODULES:
                yield f"megatron.recompute_modules: {module!r} is taken to save nothing"
