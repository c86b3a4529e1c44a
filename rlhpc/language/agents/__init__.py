"""Agents: episodes of several turns, in the rollout rank or in programs of their own."""
