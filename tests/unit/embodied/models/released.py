"""Small folders in the form of released models."""

from __future__ import annotations

from pathlib import Path

from tests.extras import need_extra

need_extra("llm")


#: What timm says of the two vision transformers: names and shapes of the weights with 224 pixels a side (of one block, and
#: how many there are), and what the last layer but one gives of tiny ones, every other patch and every fourth feature.
HERE = Path(__file__).parent
BOUNDS = {"q01": [-0.9, 0.1, 0], "q99": [0.9, 0.9, 1], "min": [-1, 0, 0], "max": [1, 1, 1], "mask": [True, True, False]}
PROPRIO = {"q01": [-2.0] * 5, "q99": [0.5] * 5, "min": [-3.0] * 5, "max": [2.0] * 5}
STATISTICS = {"mine": {"action": BOUNDS, "proprio": PROPRIO, "num_transitions": 10, "num_trajectories": 2}}
