"""Evaluation of language models and reward models, chat in the terminal, and generation of preference data."""
