"""Report pages of language runs: evaluation metrics, samples and curves."""
