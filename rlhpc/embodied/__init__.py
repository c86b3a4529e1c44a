"""Embodied policies: environments, policy networks, demonstrations, robots, and the runs that train them."""
