"""Memory plan: the memory of each rank, term by term, before anything starts."""
