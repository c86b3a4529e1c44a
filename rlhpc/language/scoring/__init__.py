"""Scoring groups: reference, teacher, reward models and LLM judges on separate ranks."""
