"""What LeRobot finds in a dataset, in its own Python: `python lerobot_reads.py FOLDER` prints a line of JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

# Operators that its build of torchvision may lack.
library = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from lerobot.datasets.compute_stats import aggregate_stats, get_feature_stats
from lerobot.datasets.lerobot_dataset import LeRobotDataset

root = sys.argv[1]
plain = LeRobotDataset("local/set", root=root)
ahead = LeRobotDataset("local/set", root=root, delta_timestamps={"action": [0.0, 1 / plain.fps]})
rows = [plain[i] for i in range(plain.num_frames)]
episodes = []
for number in range(plain.num_episodes):
    own = [row for row in rows if int(row["episode_index"]) == number]
    stats = {}
    for name in ("observation.state", "action"):
        stats[name] = get_feature_stats(torch.stack([row[name] for row in own]).numpy(), axis=0, keepdims=False)
    for name in plain.meta.camera_keys:
        seen = torch.stack([row[name] for row in own]).mul(255).round().numpy()  # of uint8, its squares wrap around
        found = get_feature_stats(seen, axis=(0, 2, 3), keepdims=True)
        stats[name] = {
            key: value if key == "count" else np.squeeze(value / 255, axis=0) for key, value in found.items()
        }
    episodes.append(stats)
print(json.dumps({
    "fps": plain.fps, "robot_type": plain.meta.robot_type, "names": plain.features["action"]["names"],
    "cameras": sorted(plain.meta.camera_keys), "tasks": sorted({row["task"] for row in rows}),
    "times": [float(row["timestamp"]) for row in rows],
    "next": [[int(row["action_is_pad"][1]), *row["action"][1].tolist()] for row in (ahead[i] for i in range(len(rows)))],
    "stats": {name: {key: np.asarray(value).tolist() for key, value in each.items()}
              for name, each in aggregate_stats(episodes).items()},
}))  # fmt: skip
