"""Interventions: a person or a script acts in place of a policy, marks episodes and pauses the environment."""
