"""Live views of runs: the pages of `rlhpc serve`, read from run folders alone."""
