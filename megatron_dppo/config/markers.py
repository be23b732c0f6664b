"""The base of all config sections, and markers of a setting in its type: what it needs, and what it changes.

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


def idle_settings(config: BaseModel) -> Iterator[tuple[str, Needs]]:
    """Yield the settings that differ from their defaults and have no effect, with what they need."""

    def walk(section: BaseModel, prefix: str, needs: Needs | None) -> Iterator[tuple[str, Needs]]:
        for name, info in type(section).model_fields.items():
            value, own = getattr(section, name), next((m for m in info.metadata if isinstance(m, Needs)), needs)
            if isinstance(value, Section):
                yield from walk(value, f"{prefix}{name}.", own)
                continue
            is_set = value != info.get_default(call_default_factory=True)
            if is_set and own is not None and not own.are_met(config):
                yield f"{prefix}{name}", own

    yield from walk(config, "", None)


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
