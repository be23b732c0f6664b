"""Parts of one training run: start-up, state, checkpoints, log and stop signals."""
