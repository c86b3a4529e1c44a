"""What the ranks of a run hold in memory, term by term, and whether that fits; worked out before anything starts."""
