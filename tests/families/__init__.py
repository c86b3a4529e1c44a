"""Table of model families: tiny models of 29 families through the trainer and the hf engine."""
