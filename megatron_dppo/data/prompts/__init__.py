"""Prompts: prepared, read, checked and streamed."""
