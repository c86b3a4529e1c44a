"""Robots in the env rank's process or on other machines, behind one safety core."""
