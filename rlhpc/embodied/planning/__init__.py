"""Estimates before the start of an embodied run: memory and work of a step."""
