"""Gateway of a rollout rank: an HTTP server by which agents' programs ask its engine."""
