"""Policies of LeRobot's library, in its own folders; they are built in a Python that has it (`make setup-lerobot`)."""
