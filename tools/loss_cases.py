"""Re-exports tools/benchmarks/loss_cases.py for scripts that have tools/ and the root on their path."""

from tools.benchmarks.loss_cases import Case, Shape

__all__ = ["Case", "Shape"]
