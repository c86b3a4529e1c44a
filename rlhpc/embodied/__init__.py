"""Policies in simulators: environments, policy networks, demonstrations, and the runs that train them."""
