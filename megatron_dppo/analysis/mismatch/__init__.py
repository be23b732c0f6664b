"""How far the trainer's policy stands from the engine's for the same weights, before any training."""
