"""Environments by name. Importing this package registers all of them."""

from megatron_dppo.environments.base import (
    ENVIRONMENTS,
    Environment,
    EnvironmentFault,
    Environments,
    Episode,
    Observation,
    Play,
    Response,
    Turn,
    environment,
    problem_with,
    register,
)
from megatron_dppo.environments.host import Host, InProcess
from megatron_dppo.environments.single_turn import SingleTurn

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFault",
    "Environments",
    "Episode",
    "Host",
    "InProcess",
    "Observation",
    "Play",
    "Response",
    "SingleTurn",
    "Turn",
    "environment",
    "problem_with",
    "register",
]
