"""Measures how far the trainer's policy is from the engine's for the same weights, before any training."""
