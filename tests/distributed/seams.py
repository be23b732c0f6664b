"""Settings and those who use them: what reached a function of the package while something real ran.

A `Seam` names a setting, the function deep in the package that uses it, and how to read from a call of that
function what it was given. `recording` watches the functions of many seams at once.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest import mock

from megatron_dppo.config import Config
from megatron_dppo.rewards import RewardChoice

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
        consumer: "module:function" as the caller imports it, or "module:Class.method"; a module of the package
            without its name.
        read: Reads the value from a recorded call.
        scenario: Name of the scenario.
        expected: Computes the value from the config. `None` means the setting's value.
        where: Which calls count.
        fold: Reduces the values of all calls to one.
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


# How the rows of `seam_table.py` read calls.


def given(name: str) -> Callable[[Received], Any]:
    """Read an argument, or what is inside of one: "params.temperature", "groups.0.eps"."""

    def read(call: Received) -> Any:
        value: Any = call
        for part in name.split("."):
            if isinstance(value, Mapping):
                value = value[part]
            else:
                value = value[int(part)] if part.lstrip("-").isdigit() else getattr(value, part)
        return value

    return read


def plain(setting: str, consumer: str, argument: str, **more: Any) -> Seam:
    """A setting that arrives as it is."""
    return Seam(setting, consumer, given(argument), **more)


def rows(scenario: str, text: str) -> Iterator[Seam]:
    """Settings that arrive as they are, one a line: the setting, its consumer and the argument.

    `{a,b}` expands to several settings, and `*` in the argument to the name of each.
    """
    for line in filter(None, map(str.strip, text.splitlines())):
        setting, consumer, argument = line.split()
        section, _, names = setting.partition("{")
        for name in names.rstrip("}").split(","):
            key = section + name
            yield plain(key, consumer, argument.replace("*", key.rpartition(".")[2]), scenario=scenario)


def is_training(call: Received) -> bool:
    return call.evaluated is None


def evaluates(name: str) -> Callable[[Received], bool]:
    return lambda call: call.evaluated == name


def called(values: list[Any]) -> bool:
    return bool(values)


def learning_rates(config: Config) -> list[float]:
    """Of each gradient step: warm-up from 0, then down to min_lr at the last step."""
    options, total = config.optimizer, config.num_gradient_steps
    rates: list[float] = []
    for number in range(1, total + 1):
        if number <= options.warmup_steps:
            rates.append(options.lr * number / options.warmup_steps)
            continue
        left = 1 - (number - options.warmup_steps) / (total - options.warmup_steps)
        if options.schedule == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        rates.append(options.min_lr + left * (options.lr - options.min_lr))
    return [round(rate, 12) for rate in rates]


def worker_reward(call: Received) -> RewardChoice:
    """What a worker makes of the name on its command line."""
    return RewardChoice.read(call.name)


def sampled(setting: str, argument: str, where: Callable[[Received], bool] = is_training) -> list[Seam]:
    """Seams of the embedded engine's settings: the admission of a request and the sampling of its tokens."""
    batch = "engines.embedded.continuous_batch"
    found = [plain(setting, f"{batch}:ContinuousBatch.__init__", f"params.{argument}", where=where)]
    if argument in ("temperature", "top_p"):
        found.append(plain(setting, f"{batch}:sampling_log_probs", argument, where=where))
    return found


def flag(call: Received, name: str) -> str:
    """What follows a flag in the command of a server."""
    command = call.result.command
    return command[command.index(name) + 1]


def metric(name: str) -> Callable[[Received], float]:
    """Read a metric of a gradient step."""
    return lambda call: call.result.metrics.values()[name]


def rounded(values: list[float]) -> list[float]:
    return [round(value, 12) for value in values]


def routing_replay(call: Received) -> tuple[bool, bool]:
    """Whether a forward pass uses the rollout's routes, and whether it is measured how far the model agrees."""
    return call.is_replaying, call.is_measuring


def sorted_set(values: list[Any]) -> list[Any]:
    return sorted(set(values))


def size(setting: str, world_size: Callable[[], int | None], scenario: str) -> Seam:
    """A size of Megatron's groups, once the model is built."""
    return Seam(f"parallel.{setting}", "actor.actor:Actor.__init__", lambda call: world_size(), scenario)
