"""Training of language models on a rank: trainer, prompt dispatch and weight sync."""
