"""Language models as networks: token batches, scores, adapters, Hugging Face folders."""
