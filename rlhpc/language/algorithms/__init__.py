"""What a run by RL on a language model optimizes: an object that says which columns it needs, who makes them, and what the
advantages and the loss are."""
