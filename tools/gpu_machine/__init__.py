"""Runs every step that needs a GPU on one machine with one command (see __main__.py)."""
