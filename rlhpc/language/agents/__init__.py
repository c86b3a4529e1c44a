"""Agents: episodes of several turns, in the rollout rank or in separate programs."""
