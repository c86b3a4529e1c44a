"""Language models on verifiable tasks: prompts, rewards, engines, agents, and the runs that train them."""
