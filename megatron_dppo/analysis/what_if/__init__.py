"""Evaluates other trust regions on mini-batches that a run kept: no engine, one forward."""
