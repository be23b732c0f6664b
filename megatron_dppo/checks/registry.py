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
"""What a rule reads, and so where it can be asked.

config: the config, the model's config.json and the number of processes alone, so that `plan` asks it too.
machine: other files, and libraries. data: every row of the prompt files. trial: what runs the user's code, or a
library, in a process of its own. now: what another process does at this moment; `train` finds it out by itself.
"""


@dataclass(frozen=True)
class Rule:
    """One thing that must hold.

    Attributes:
        id: A short name, unique.
        description: What must hold, one sentence.
        check: Yields a `Problem` for each fault; yields none where what it needs could not be read, since the
            rule about that reading reports it.
        needs: What it reads, and so where it can be asked.
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
