"""Embodied data: trajectories, demonstrations, replay buffers, and the file formats of ManiSkill, LeRobot and Minari."""
