"""Reinforcement-learning post-training of MoE language models with Divergence PPO."""

__version__ = "0.1.0"
