"""How trained weights reach the rollout engine."""
