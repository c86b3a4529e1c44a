"""Construction of policies on training ranks."""
