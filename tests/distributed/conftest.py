"""Options of the distributed tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-layouts`: write the measured errors into megatron_dppo/actor/LAYOUTS.md."""
    parser.addoption("--write-layouts", action="store_true", help="write the table of layouts")
