"""Algebra on answers, by math-verify and sympy. Importing this takes a second: only the worker of `math` does.

math-verify's own time-outs are off. They count seconds on the wall, so a busy machine would decide other than
an idle one; this module counts the processor's.
"""

import logging
import signal
from functools import lru_cache
from types import FrameType
from typing import Any, cast

from math_verify import (  # pyright: ignore[reportMissingTypeStubs]
    LatexExtractionConfig,
    parse,
    verify,
)

_MAX_CPU_S = 1.0
_AGAIN_AFTER_S = 0.1
# Only what is LaTeX counts: math-verify's other extraction takes the last number of any text.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off


class TooHardError(Exception):
    """Two answers could not be compared in the time that a comparison may take."""


class _OutOfTimeError(BaseException):
    """No `except Exception` of a library may stop it."""


def are_equal(reference: str, answer: str) -> bool:
    r"""Return whether math-verify finds two answers equal, given as the content of `\boxed{...}`.

    Only the main thread of a process can ask. Processor time is counted, not what passes on the wall.

    Raises:
        TooHardError: After a second of computing.
    """
    is_asking = True

    def stop(number: int, frame: FrameType | None) -> None:
        if is_asking:
            raise _OutOfTimeError

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_CPU_S, _AGAIN_AFTER_S)
    try:
        return verify(_parsed(reference), _parse(answer), timeout_seconds=None, allow_set_relation_comp=True)
    except _OutOfTimeError:
        raise TooHardError from None
    finally:
        is_asking = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, previous)


def _parse(text: str) -> list[Any]:
    no_timeout = cast(int, None)
    return parse(rf"\boxed{{{text}}}", _EXTRACTION, parsing_timeout=no_timeout)  # pyright: ignore[reportUnknownVariableType]


_parsed = lru_cache(maxsize=256)(_parse)  # all responses to a prompt have one reference

are_equal(r"\frac{1}{2}", r"\sqrt{x}")  # the parser builds its tables at the first use
