"""Helper jobs: ranks that join a run from separate Slurm jobs."""
