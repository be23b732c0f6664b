"""Reinforcement-learning post-training of MoE language models with Divergence PPO."""

import sys

__version__ = "0.2.0.dev0"

if sys.flags.optimize > 1:
    raise ImportError(
        "found Python without docstrings (-OO, or PYTHONOPTIMIZE=2); expected them, since transformers and the "
        "commands read them. Unset PYTHONOPTIMIZE, or set it to 1."
    )
