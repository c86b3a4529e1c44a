"""Traces of runs: reading of the ranks' files, alignment of clocks, export and analysis of steps."""
