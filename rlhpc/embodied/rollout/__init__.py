"""Rollout of embodied runs: slots, links between env and rollout ranks, and the batch that reaches the actor."""
