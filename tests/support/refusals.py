"""Errors of the package by their structure: the place at fault, and the names and values in the message."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_dppo.errors import ConfigError, DataError


@contextmanager
def refused(where: str, *values: str, error: type[ConfigError | DataError] = ConfigError) -> Iterator[None]:
    """Require that the body raises an error of one problem, at this place, which names these values."""
    with pytest.raises(error) as caught:
        yield
    raised = caught.value
    (problem,) = raised.problems if isinstance(raised, ConfigError) else (raised.problem,)
    assert problem is not None and problem.where == where, raised
    assert [value for value in values if value not in str(problem)] == [], raised
