"""The rollout engine within the trainer's processes: continuous batching over a transformers model."""
