"""One training run: its start-up, state, checkpoints, log and stop signals."""
