"""Prepares, reads, checks and streams prompts."""
