"""LeRobot policies: ACT, diffusion, SmolVLA, π0 and π0.5."""
