"""Language model networks: token batches, packing, log-probs, value heads and loading."""
