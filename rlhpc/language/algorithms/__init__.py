"""Algorithms of language models: the columns that they need, advantages and loss."""
