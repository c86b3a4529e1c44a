"""Algorithms of language models: required columns, advantages and loss."""
