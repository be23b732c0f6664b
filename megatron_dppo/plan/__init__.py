"""Plans a run without loading a model: whether `train` accepts it, its memory, and the layouts that fit."""

from megatron_dppo.plan.gpu_rates import read_rates
from megatron_dppo.plan.job import Machine, measured_machine
from megatron_dppo.plan.plan import Plan, make_plan, offload_remarks
from megatron_dppo.plan.report import as_json, as_text
from megatron_dppo.plan.serving import load_remarks
from megatron_dppo.plan.split import Split, divide, parse_assumptions, split_as_json, split_as_text
from megatron_dppo.plan.units import parse_bytes

__all__ = [
    "Machine",
    "Plan",
    "Split",
    "as_json",
    "as_text",
    "divide",
    "load_remarks",
    "make_plan",
    "measured_machine",
    "offload_remarks",
    "parse_assumptions",
    "parse_bytes",
    "read_rates",
    "split_as_json",
    "split_as_text",
]
