"""Environments by name. Importing this package registers the built-in ones."""

from megatron_dppo.environments.base import (
    ENVIRONMENTS,
    Environment,
    EnvironmentFault,
    Environments,
    Observation,
    Response,
    Trajectory,
    Turn,
    environment,
    problem_with,
    register,
)
from megatron_dppo.environments.built_in import SingleTurn, Sudoku, gem_task
from megatron_dppo.environments.pool import EnvironmentPool, Host, InProcess
from megatron_dppo.types import Episode

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentFault",
    "EnvironmentPool",
    "Environments",
    "Episode",
    "Host",
    "InProcess",
    "Observation",
    "Response",
    "SingleTurn",
    "Sudoku",
    "Trajectory",
    "Turn",
    "environment",
    "gem_task",
    "problem_with",
    "register",
]
