"""Prompts, the sanity task, packing, and the batches of a gradient step."""
