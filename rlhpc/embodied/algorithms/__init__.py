"""Algorithms of embodied runs: policy updates from a batch of transitions."""
