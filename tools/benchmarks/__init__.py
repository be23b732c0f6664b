"""Benchmarks. Run `python -m tools.benchmarks.NAME` from the repository's root."""
