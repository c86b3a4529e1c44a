"""Statistics of a small folder in the form of a released model."""

from __future__ import annotations

BOUNDS = {"q01": [-0.9, 0.1, 0], "q99": [0.9, 0.9, 1], "min": [-1, 0, 0], "max": [1, 1, 1], "mask": [True, True, False]}
PROPRIO = {"q01": [-2.0] * 5, "q99": [0.5] * 5, "min": [-3.0] * 5, "max": [2.0] * 5}
STATISTICS = {"mine": {"action": BOUNDS, "proprio": PROPRIO, "num_transitions": 10, "num_trajectories": 2}}
