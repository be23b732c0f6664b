"""Re-exports tools/benchmarks/jobs.py for scripts that have tools/ and the root on their path."""

from tools.benchmarks.jobs import build_actor, random_samples, step_of, step_seconds, write_model

__all__ = ["build_actor", "random_samples", "step_of", "step_seconds", "write_model"]
