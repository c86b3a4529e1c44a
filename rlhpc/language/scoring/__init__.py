"""Scoring groups: reference, teacher, reward models and LLM judges on ranks of their own."""
