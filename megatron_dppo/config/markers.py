"""The base of all config sections, and markers of a setting in its type: what it needs, excludes and changes.

A marker of a section holds for its settings that have none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Evaluated = Literal["no", "all sets", "own set", "weights"]


class Section(BaseModel):
    """Base of all sections: frozen, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


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
