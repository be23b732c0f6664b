"""Sends trained weights to the rollout engine."""
