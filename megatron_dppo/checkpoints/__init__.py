"""Checkpoint folders on disk: Hugging Face's, the run's own, and what of them is never trusted."""
