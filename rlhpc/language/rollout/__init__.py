"""Rollout of language models: prompt queue, groups, engine groups and the batch that reaches the actor."""
