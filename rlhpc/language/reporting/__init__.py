"""Report pages of language runs: metrics of evaluations, samples and curves."""
