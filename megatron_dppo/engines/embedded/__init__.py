"""Rollout engine in the trainer's processes: continuous batching over a transformers model."""
