"""Benchmarks of rlhpc against other programs and the limits of the machine. Results lie in `bench/results`."""
