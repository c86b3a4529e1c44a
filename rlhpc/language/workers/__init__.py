"""The worker classes of a language model's run: actor (trains), rollout (writes and is judged)."""
