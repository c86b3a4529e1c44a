"""Robots on machines outside the cluster: how they come to a run, and what is said between them."""
