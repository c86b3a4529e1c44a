"""The loops of a language model's run."""
