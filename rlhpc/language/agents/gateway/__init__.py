"""Gateway of a rollout rank: HTTP server through which external agents call its engine."""
