"""Prepares and reads prompts, makes the sanity task, and packs the micro-batches of gradient steps."""
