"""Benchmarks: what is measured against what. Results lie in `bench/results`."""
