"""Reads and writes checkpoint folders: Hugging Face's, the run's own, and untrusted ones."""
