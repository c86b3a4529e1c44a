"""Rewards that are networks: success classifiers."""
