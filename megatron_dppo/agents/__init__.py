"""Agents that somebody else wrote, as rollouts. Workers import it, and start without a tensor library."""

from megatron_dppo.agents.harness import AgentOutcome

__all__ = ["AgentOutcome"]
