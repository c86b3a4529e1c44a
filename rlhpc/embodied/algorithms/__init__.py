"""Algorithms of embodied runs: one update of a policy from a batch, by name."""
