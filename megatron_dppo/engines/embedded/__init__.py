"""Rollout engine in the trainer's processes: continuous batching with a transformers model."""
