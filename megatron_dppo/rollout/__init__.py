"""Rollout engines and the collection of scored samples."""
