"""Training of language models: data, rewards, engines, agents, algorithms and task types."""
