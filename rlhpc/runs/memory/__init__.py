"""Memory plan: an estimate of each rank's memory before the start of a run, term by term."""
