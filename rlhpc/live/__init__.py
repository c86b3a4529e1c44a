"""Live views of runs: the pages of `rlhpc serve`, which read only run folders."""
