"""Engines that sample responses, and the weight sync that updates them."""
