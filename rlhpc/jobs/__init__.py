"""Slurm jobs of a run: plan, submission through submitit, states, waits and cancelling."""
