"""Rollout of embodied runs: slots, links between env and rollout ranks, and outcomes of steps."""
