"""Registries of entries with an explicit id, the number by which the kernels identify them."""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from megatron_dppo.errors import ConfigError, Problem


class Identified(Protocol):
    """An entry of a registry, with an explicit id."""

    @property
    def id(self) -> int:
        """The number, which no other entry of the registry has."""
        ...


Entry = TypeVar("Entry", bound=Identified)


def registry(name: str, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
    """Return the entries, read-only, after a check that each id is unique. Their order does not matter.

    Args:
        name: Name of the registry in messages.
        entries: Entry per name that an objective can use.

    Raises:
        ConfigError: Two entries have one id.
    """
    holders: defaultdict[int, list[str]] = defaultdict(list)
    for entry_name, entry in entries.items():
        holders[entry.id].append(entry_name)
    action = f"Give one of them another: {max(holders, default=-1) + 1} is free."
    problems = [
        Problem(name, f"id {id} of {' and '.join(names)}", "a unique id for each", action)
        for id, names in holders.items()
        if len(names) > 1
    ]
    if problems:
        raise ConfigError(problems)
    return MappingProxyType(dict(entries))
