"""Runs and measures one rank's gradient step at full size, without weights and without a GPU."""

from megatron_dppo.plan.trace.depths import Trace, trace_run
from megatron_dppo.plan.trace.report import as_json, as_text

__all__ = ["Trace", "as_json", "as_text", "trace_run"]
