"""The recipes start with the longest files."""

from tests.support.longest_first import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
