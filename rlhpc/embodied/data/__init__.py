"""Trajectories, demonstrations and replay buffers."""
