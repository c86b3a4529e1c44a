"""Publication of runs and policies: bundles of runs, their reproduction, and uploads of exports."""
