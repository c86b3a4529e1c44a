"""Worker classes of language runs: actors, critic, rollout, agents and scoring groups."""
