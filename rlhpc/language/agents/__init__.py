"""Episodes of several turns: who speaks between two responses of the model."""
