"""Compares the values of answers within a time limit.

Importing it loads mpmath, so only the worker of `math` imports it. The limit is processor time of the thread,
so that a busy machine gives the same result as an idle one. In the main thread a signal ends the computation.
Python delivers signals only there, so in other threads a watcher raises the exception.
"""

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from types import FrameType
from typing import TypeVar

from megatron_dppo.rewards.math.equality import are_equal_trees
from megatron_dppo.rewards.math.exact import TooLargeError, UndefinedError, rational
from megatron_dppo.rewards.math.parser import parse
from megatron_dppo.rewards.math.tree import Node, NotUnderstoodError, Number, Tree

_MAX_CPU_S = 1.0
_ONE_AT_A_TIME = threading.Lock()  # for threads: mpmath caches numbers


class TooHardError(Exception):
    """Two answers could not be compared within the limits of time and digits."""


def are_equal(reference: str, answer: str, *, per_cents: tuple[bool, bool] = (False, False)) -> bool:
    r"""Return whether two answers, without words and units, are equal. Any thread may call it.

    Args:
        reference: Tidy reference answer.
        answer: Tidy answer of the response.
        per_cents: Whether the reference and the answer had a per cent sign.

    Raises:
        TooHardError: Computing took more than a second, or a number has too many digits.
    """
    try:
        with _ONE_AT_A_TIME:
            return within(_MAX_CPU_S, lambda: _compare(reference, answer, per_cents))
    except (OutOfTimeError, TooLargeError, RecursionError):
        raise TooHardError from None


def _compare(reference: str, answer: str, per_cents: tuple[bool, bool]) -> bool:
    expected, found = _parsed(reference), _tree(answer)
    if expected is None or found is None:
        return False
    if per_cents[0] == per_cents[1]:
        return are_equal_trees(expected, found)
    if (per_cents[0] or not _is_below_one(expected)) and are_equal_trees(expected, found):
        return True
    if per_cents[0]:
        return are_equal_trees(_hundredth(expected), found)
    return are_equal_trees(expected, _hundredth(found))


def _is_below_one(node: Node) -> bool:
    """Return whether a number is a fraction of one, so that a per cent sign changes its value."""
    try:
        value = rational(node)
    except UndefinedError:
        return True
    return value is not None and 0 < abs(value) < 1


def _hundredth(node: Node) -> Node:
    """Return each value of a tree divided by a hundred."""
    if isinstance(node, Number):
        return Number(node.value / 100, None if node.places is None else node.places + 2)
    if isinstance(node, Tree) and node.kind in ("list", "or", "()", "[]", "(]", "[)", "set"):
        return Tree(node.kind, tuple(map(_hundredth, node.parts)))
    return Tree("/", (node, Number(Fraction(100))))


def _tree(text: str) -> Node | None:
    try:
        return parse(text)
    except NotUnderstoodError:
        return None


_parsed = lru_cache(maxsize=256)(_tree)  # all responses to a prompt share the reference


_Result = TypeVar("_Result")
_AGAIN_AFTER_S = 0.1


class OutOfTimeError(BaseException):
    """The time is over. It is not an `Exception`, so that libraries do not catch it."""


def within(seconds: float, compute: Callable[[], _Result]) -> _Result:
    """Return the result of a function.

    Raises:
        OutOfTimeError: The function used more processor time than the limit.
    """
    if threading.current_thread() is threading.main_thread():
        return _by_signal(seconds, compute)
    return _by_watcher(seconds, compute)


def _by_signal(seconds: float, compute: Callable[[], _Result]) -> _Result:
    is_computing = True

    def stop(number: int, frame: FrameType | None) -> None:
        if is_computing:
            raise OutOfTimeError

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_AFTER_S)
    try:
        return compute()
    finally:
        is_computing = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous)


def _by_watcher(seconds: float, compute: Callable[[], _Result]) -> _Result:
    is_over = threading.Event()
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        while not is_over.wait(_AGAIN_AFTER_S):
            if time.clock_gettime(clock) > end:
                _raise_in(thread, OutOfTimeError)

    watcher = threading.Thread(target=watch, name="time limit", daemon=True)
    watcher.start()
    try:
        return compute()
    finally:
        while watcher.is_alive():
            try:
                is_over.set()
                watcher.join()
            except OutOfTimeError:  # raised after the result was computed
                continue
        _raise_in(thread, None)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise an exception at its next step. `None` cancels an exception not yet raised."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
