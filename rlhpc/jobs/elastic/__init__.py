"""Ranks from jobs of their own: what such a job asks for, how many there are to be, and the jobs themselves."""
