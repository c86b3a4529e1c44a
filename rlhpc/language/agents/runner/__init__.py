"""Programs that run agents in their own interpreter. They need the standard library alone."""
