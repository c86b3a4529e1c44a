"""Helper jobs: ranks that join a run from Slurm jobs of their own."""
