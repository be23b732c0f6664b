"""R3: capture, validation and replay of the rollout's expert choices."""
