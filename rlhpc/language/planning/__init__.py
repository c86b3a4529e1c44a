"""What the ranks of a language model's run hold in memory, worked out from the model's configuration and the run's."""
