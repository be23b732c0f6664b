"""Re-exports tools/benchmarks/loss_contenders.py for scripts that have tools/ and the root on their path."""

from tools.benchmarks.loss_contenders import linear_leaves, logits_leaf, ours_and_floors, run

__all__ = ["linear_leaves", "logits_leaf", "ours_and_floors", "run"]
