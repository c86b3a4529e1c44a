"""Programs that run agents in a separate interpreter. They need only the standard library."""
