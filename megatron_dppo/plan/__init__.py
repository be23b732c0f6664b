"""How much memory a run needs before it is started, and which layouts fit; loads no model and no Megatron."""

from megatron_dppo.plan.machine import Machine
from megatron_dppo.plan.options import Options
from megatron_dppo.plan.plan import Plan, make_plan
from megatron_dppo.plan.report import as_json, as_text
from megatron_dppo.plan.units import parse_bytes

__all__ = ["Machine", "Options", "Plan", "as_json", "as_text", "make_plan", "parse_bytes"]
