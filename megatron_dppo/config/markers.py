"""The base of all config sections, and markers of a setting in its type: needs, clashes, bounds and effects.

A marker of a section holds for its settings that have none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter, eq, ge, le, lt
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict

from megatron_dppo.errors import Problem

Evaluated = Literal["no", "all sets", "own set", "weights"]


class Section(BaseModel):
    """Base of all sections: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the section of a setting that is a table, or the sections of which it is one."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Section) else []
    if get_origin(annotation) is Annotated:
        return sections_in(get_args(annotation)[0])
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [section for member in members for section in sections_in(member)]


@dataclass(frozen=True)
class Needs:
    """Marks a setting, or a section, that has an effect only with certain values of another setting.

    Attributes:
        key: The other setting, or a property of its section.
        on: Value that it needs, also as one of several; `None`: any but false, 0 and empty.
        off: Value that turns the setting off.
    """

    key: str
    on: Any = None
    off: Any = None

    def are_met(self, config: BaseModel) -> bool:
        """Return whether the setting has an effect in a config."""
        value = attrgetter(self.key)(config)
        if self.on is not None:
            return value == self.on or (isinstance(value, tuple) and self.on in value)
        return bool(value) and value != self.off

    @property
    def text(self) -> str:
        """What turns the setting on."""
        key = self.key.replace(".is_set", ".harness or command")
        return f"{key} = {self.on!r}" if self.on is not None else key


@dataclass(frozen=True)
class Clash:
    """Marks a setting that is refused together with another one.

    Attributes:
        key: The other setting, or a property of its section.
        because: Value that is expected, and why.
        value: Value of the other setting that clashes; `None`: any but its default.
        when: Own value that clashes; `None`: any but the default.
        unless: A setting that lets both have an effect; empty: none does.
    """

    key: str
    because: str
    value: Any = None
    when: Any = None
    unless: str = ""

    def is_between(self, config: BaseModel, own: str) -> bool:
        """Return whether two settings exclude each other in a config."""
        if self.unless and attrgetter(self.unless)(config):
            return False
        return _has(config, own, self.when) and _has(config, self.key, self.value)


_HOLDS: dict[str, Callable[[Any, Any], bool]] = {"<": lt, "<=": le, ">=": ge, "==": eq}
_WORDS = {"<": "less than ", "<=": "at most ", ">=": "at least ", "==": ""}


@dataclass(frozen=True)
class Bound:
    """Marks a setting that training compares with a number or with another setting; `evaluate` does not.

    Attributes:
        relation: Relation of the setting to the limit.
        limit: Number, or the key of another setting or of a property.
        because: Reason; empty if it is obvious.
        name: Limit as a user reads it, if it is a property.
    """

    relation: Literal["<", "<=", ">=", "=="]
    limit: float | str
    because: str = ""
    name: str = ""

    def problem(self, config: BaseModel, key: str) -> Problem | None:
        """Return the problem if a setting of a config is beyond its limit."""
        value, limit = attrgetter(key)(config), self.limit
        if isinstance(limit, str):
            limit = attrgetter(limit)(config)
        if _HOLDS[self.relation](value, limit):
            return None
        other = self.name or (self.limit if isinstance(self.limit, str) else "")
        expected = _WORDS[self.relation] + (f"{other} = {limit:g}" if other else f"{limit:g}")
        expected += f": {self.because}" if self.because else ""
        action = {">": "Raise", "=": "Correct"}.get(self.relation[0], "Lower")
        return Problem(key, f"{value:g}", expected, f"{action} it{f', or change {other}' if other else ''}.")


def _has(config: BaseModel, key: str, value: Any) -> bool:
    """Return whether a setting has a value, or for `None` any but its default."""
    found = attrgetter(key)(config)
    if value is not None:
        return found == value
    if isinstance(found, Section):
        return bool(getattr(found, "is_set", True))
    path, _, name = key.rpartition(".")
    section: BaseModel = attrgetter(path)(config) if path else config
    info = type(section).model_fields.get(name)
    return bool(found) if info is None else bool(found != info.get_default(call_default_factory=True))


def _walk(part: BaseModel, prefix: str, needs: Needs | None) -> Iterator[tuple[str, list[Any], Needs | None]]:
    """Yield the key of each setting and section, its own markers, and what it needs."""
    for name, info in type(part).model_fields.items():
        own = next((marker for marker in info.metadata if isinstance(marker, Needs)), needs)
        yield f"{prefix}{name}", info.metadata, own
        if isinstance(value := getattr(part, name), Section):
            yield from _walk(value, f"{prefix}{name}.", own)


def idle_settings(config: BaseModel) -> Iterator[tuple[str, Needs]]:
    """Yield the settings that differ from their defaults and have no effect, with what they need."""
    for key, _, needs in _walk(config, "", None):
        if needs is None or needs.are_met(config):
            continue
        if not isinstance(attrgetter(key)(config), Section) and _has(config, key, None):
            yield key, needs


def clashes(config: BaseModel) -> Iterator[tuple[str, Clash]]:
    """Yield the settings that have an effect and are refused together with another one."""
    for key, markers, needs in _walk(config, "", None):
        if needs is None or needs.are_met(config) or isinstance(attrgetter(key)(config), Section):
            found = (marker for marker in markers if isinstance(marker, Clash))
            yield from ((key, clash) for clash in found if clash.is_between(config, key))


def bound_problems(config: BaseModel) -> Iterator[Problem]:
    """Yield the problems of settings beyond their bounds."""
    for key, markers, _ in _walk(config, "", None):
        found = (marker.problem(config, key) for marker in markers if isinstance(marker, Bound))
        yield from (problem for problem in found if problem is not None)


@dataclass(frozen=True)
class Effect:
    """Marks a setting, or a section, by what a change of it means for a run and for results of `evaluate`.

    Attributes:
        resume: Reason why a resumed run may change it; None if it is part of the experiment.
        evaluated: Whether scores depend on it, and the place that records it in saved results.
    """

    resume: str | None = None
    evaluated: Evaluated = "no"


TRAINING = Effect()  # only training depends on it
ALL_SETS = Effect(evaluated="all sets")
OWN_SET = Effect(evaluated="own set")
TIME_LIMIT = Effect("A time limit.")
SCORING_TIME_LIMIT = Effect(TIME_LIMIT.resume, "all sets")
MEMORY_LIMIT = Effect("A memory limit.")
LIMIT = Effect("A limit that only ends a run.")
MEMORY = Effect("Memory placement; the numbers are the same.")
MEMORY_ROUNDING = Effect("Memory placement; the numbers are the same up to rounding.")
LAYOUT = Effect("The layout; a checkpoint that cannot be resharded is refused when it is loaded.")
SERVERS = Effect("How servers are started, called and updated.")
SAVING = Effect("Saving.")
TRACKING = Effect("What is measured and written, and what an alarm does.")
