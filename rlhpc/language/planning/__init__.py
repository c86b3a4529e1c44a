"""Estimates before the start of a language run: memory of each rank and work of a step."""
