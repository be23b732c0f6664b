"""Settings and those who use them: what reached a function of the package while something real ran.

A `Seam` names a setting, the function deep in the package that uses it, and how to read from a call of that
function what it was given. `recording` watches the functions of many seams at once.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

from megatron_dppo.config import Config

EVALUATION = "rollout.evaluation:Evaluation.run"


_OTHERS = ("megatron.", "torch")


class Received:
    """One call: its arguments by name, defaults included, as attributes; and `result`, once it has returned."""

    def __init__(self, arguments: Mapping[str, Any], evaluation: "Received | None") -> None:
        self._arguments, self._evaluation = dict(arguments), evaluation
        self.result: Any = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self._arguments[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def evaluated(self) -> str | None:
        """Name of the evaluation set that is being sampled; none outside of evaluations."""
        return None if self._evaluation is None else self._evaluation.each.name


Read = Callable[[Received], Any]
"""What a call was given of a setting, as something that pickles."""

Fold = Callable[[list[Any]], Any]
"""What all calls together show."""


def same(values: list[Any]) -> Any:
    """The one value that every call was given."""
    assert values, "its consumer was never called"
    distinct = [value for number, value in enumerate(values) if value not in values[:number]]
    assert len(distinct) == 1, f"its consumer received several values: {distinct[:10]}"
    return distinct[0]


@dataclass(frozen=True)
class Seam:
    """A setting, and what its consumer must have received.

    Attributes:
        setting: Dotted key; `evaluation.sets.near.<field>` for a field of a table by name.
        consumer: "module:function" where it is looked up, or "module:Class.method"; a module of the package
            without its name.
        read: From each call.
        scenario: Name of what is run.
        expected: From the config; none: the setting's own value.
        where: Which calls count.
        fold: Of the values of all calls.
    """

    setting: str
    consumer: str
    read: Read
    scenario: str = "whole"
    expected: Callable[[Config], Any] | None = None
    where: Callable[[Received], bool] = lambda call: True
    fold: Fold = same

    def value(self, config: Config) -> Any:
        """What the consumer should receive."""
        if self.expected is not None:
            return self.expected(config)
        return setting_of(config, self.setting)

    @property
    def id(self) -> str:
        """For a test's name."""
        return f"{self.scenario}:{self.setting}>{self.consumer.rpartition('.')[2]}"


def setting_of(config: Config, key: str) -> Any:
    """A setting by its dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@contextmanager
def recording(seams: Sequence[Seam]) -> Iterator[list[list[Any]]]:
    """Watch the consumers inside the block; what each seam read from its consumer's calls, in their order."""
    seen: list[list[Any]] = [[] for _ in seams]
    watchers: dict[str, list[int]] = {EVALUATION: []}
    for number, seam in enumerate(seams):
        watchers.setdefault(seam.consumer, []).append(number)
    running: dict[str, Received] = {}

    def note(call: Received, numbers: Sequence[int]) -> None:
        for number in numbers:
            if seams[number].where(call):
                seen[number].append(seams[number].read(call))

    with ExitStack() as stack:
        for consumer, numbers in watchers.items():
            stack.enter_context(_watched(consumer, numbers, note, running))
        yield seen


@contextmanager
def _watched(
    consumer: str,
    numbers: Sequence[int],
    note: Callable[[Received, Sequence[int]], None],
    running: dict[str, Received],
) -> Iterator[None]:
    module, _, path = consumer.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module if module.startswith(_OTHERS) else f"megatron_dppo.{module}")
    for part in owners:
        owner = getattr(owner, part)
    raw = inspect.getattr_static(owner, name)
    function = raw.__func__ if isinstance(raw, classmethod) else raw
    signature = inspect.signature(function)

    @wraps(function)
    def watched(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        call = Received(bound.arguments, running.get(EVALUATION))
        if consumer == EVALUATION:
            running[EVALUATION] = call._evaluation = call
        try:
            call.result = function(*args, **options)
        finally:
            if consumer == EVALUATION:
                running.clear()
        note(call, numbers)
        return call.result

    replacement: Any = classmethod(watched) if isinstance(raw, classmethod) else watched
    with mock.patch.object(owner, name, replacement):
        yield
