"""Evaluation of language models and reward models, chat, and preference pairs."""
