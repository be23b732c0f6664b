"""Engines that generate responses, and the weights that they are sent."""
