"""Training loops of language models."""
