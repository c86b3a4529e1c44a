"""Robots in the env rank's process or on other machines, each with a safety core."""
