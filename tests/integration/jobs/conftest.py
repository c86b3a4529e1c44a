"""Fixtures of the tests of this folder: those of the jobs' unit tests."""

from tests.unit.jobs.local_jobs import fake_slurm, full_slurm, run  # noqa: F401
