"""Options of the distributed tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-layouts`: put what was measured into the actor's README."""
    parser.addoption("--write-layouts", action="store_true", help="write the table of layouts")
