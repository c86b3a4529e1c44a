"""Contenders of `bench.runtime`: the machine's limits, rlhpc, and Ray's actors."""
