"""What `bench.runtime` measures side by side: the machine's limits, rlhpc, and Ray's actors."""
