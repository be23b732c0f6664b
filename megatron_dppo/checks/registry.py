"""The ordered registry of rules."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_dppo.checks.facts import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem

Check = Callable[[Config, Facts], Iterable[Problem]]
Need = Literal["config", "machine", "data", "trial", "now"]
"""Input of a rule, which decides the commands that run the rule.

config: only the config, the model's config.json and the number of processes, so that `plan` runs the rule too.
machine: other files, and libraries. data: every row of the prompt files. trial: the result of user code, or of
a library, in a separate process. now: the present state of another process, which `train` finds out by itself.
"""


@dataclass(frozen=True)
class Rule:
    """A condition on the config.

    Attributes:
        id: A short name, unique.
        description: The condition, in one sentence.
        check: Function that yields a `Problem` for each fault. It yields none if its input could not be read,
            because the rule about that input reports it.
        needs: Input of the rule, which decides the commands that run it.
    """

    id: str
    description: str
    check: Check
    needs: Need = "config"


_rules: dict[str, Rule] = {}
RULES: Mapping[str, Rule] = MappingProxyType(_rules)
"""Every rule, in the order in which problems are reported."""


def rule(id: str, needs: Need = "config") -> Callable[[Check], Check]:
    """Register a function as a rule; the first line of its docstring is the description."""

    def register(function: Check) -> Check:
        assert id not in _rules, f"rule {id} is registered twice"
        assert function.__doc__, f"rule {id} says nothing"
        _rules[id] = Rule(id, function.__doc__.splitlines()[0], function, needs)
        return function

    return register
