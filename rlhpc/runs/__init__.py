"""Runs of any task type: composition root, training loop, run folder, report."""
