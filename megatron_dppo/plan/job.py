"""The inputs of a plan: config, model, machine."""

from dataclasses import dataclass, replace

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import ModelShape, model_shape
from megatron_dppo.checks import Facts, check_run
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.plan.activations import EXPECTED, Assumptions
from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.options import Options
from megatron_dppo.plan.partition import StagePart, partition
from megatron_dppo.plan.settings import Settings, with_settings
from megatron_dppo.plan.workload import Workload


@dataclass(frozen=True)
class Job:
    """A run on a machine: all inputs of memory and time besides the layout."""

    config: Config
    facts: Facts  # for as many processes as the machine has GPUs
    machine: Machine
    shape: ModelShape
    workload: Workload
    options: Options
    assumptions: Assumptions = EXPECTED

    @classmethod
    def of(cls, config: Config, facts: Facts, machine: Machine, assumptions: Assumptions = EXPECTED) -> "Job":
        """Return the job that a config describes.

        Raises:
            ConfigError: There is no model whose parameters are known, or an option makes no sense.
        """
        if isinstance(facts.model, Problem) or isinstance(facts.sizes, Problem):
            raise ConfigError([each for each in (facts.model, facts.sizes) if isinstance(each, Problem)][:1])
        shape = model_shape(facts.model)
        facts = replace(facts, world_size=machine.num_gpus)
        return cls(config, facts, machine, shape, Workload.of(config, shape), Options.of(config), assumptions)

    def having(self, settings: Settings) -> "Job":
        """Return the same job with other values of some keys."""
        config = with_settings(self.config, settings)
        return replace(
            self, config=config, workload=Workload.of(config, self.shape), options=Options.of(config)
        )

    def on(self, num_gpus: int) -> "Job":
        """Return the same job on more or fewer GPUs."""
        machine = replace(self.machine, num_gpus=num_gpus)
        return replace(self, machine=machine, facts=replace(self.facts, world_size=num_gpus))

    @property
    def problems(self) -> list[Problem]:
        """Problems for which `train` refuses the config on this many processes, by the rules of `train`."""
        return check_run(self.config, self.facts)

    @property
    def layout(self) -> Layout:
        """The configured layout.

        Raises:
            LayoutError: The processes do not divide.
        """
        return Layout.of(self.config.parallel, self.machine.num_gpus)

    def partition(self, layout: Layout) -> tuple[StagePart, ...]:
        """Return the part of the model on each pipeline stage of a layout."""
        return partition(self.shape, layout, self.config.optimizer.distributed)
