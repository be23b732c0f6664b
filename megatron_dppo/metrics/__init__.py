"""Metrics that are measured while a run trains."""
