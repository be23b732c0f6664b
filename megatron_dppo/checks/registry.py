"""The ordered registry of rules."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_dppo.checks.facts import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem

Check = Callable[[Config, Facts], Iterable[Problem]]


@dataclass(frozen=True)
class Rule:
    """One thing that must hold.

    Attributes:
        id: A short name, unique.
        description: What must hold, one sentence.
        check: Yields a `Problem` for each fault; yields none where what it needs could not be read, since the
            rule about that reading reports it.
    """

    id: str
    description: str
    check: Check


_rules: dict[str, Rule] = {}
RULES: Mapping[str, Rule] = MappingProxyType(_rules)
"""Every rule, in the order in which problems are reported."""


def rule(id: str) -> Callable[[Check], Check]:
    """Register a function as a rule; the first line of its docstring is the description."""

    def register(function: Check) -> Check:
        assert id not in _rules, f"rule {id} is registered twice"
        assert function.__doc__, f"rule {id} says nothing"
        _rules[id] = Rule(id, function.__doc__.splitlines()[0], function)
        return function

    return register
