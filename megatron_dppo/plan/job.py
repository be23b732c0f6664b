"""What a plan is made of."""

from dataclasses import dataclass

from megatron_dppo.actor.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.plan.activations import EXPECTED, Assumptions
from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.model import ModelShape
from megatron_dppo.plan.options import Options
from megatron_dppo.plan.partition import StagePart, partition
from megatron_dppo.plan.stages import Split
from megatron_dppo.plan.workload import Workload


@dataclass(frozen=True)
class Job:
    """All that memory and time depend on beside the layout."""

    config: Config
    shape: ModelShape
    workload: Workload
    machine: Machine
    options: Options
    assumptions: Assumptions = EXPECTED
    is_engine_separate: bool = False  # SGLang has GPUs of its own

    def partition(self, layout: Layout) -> tuple[StagePart, ...]:
        """What each pipeline stage of a layout holds.

        Raises:
            LayoutError: Layers do not divide over the pipeline.
        """
        return partition(self.shape, layout, Split.of(self.config.megatron), self.config.optimizer.distributed)
