"""Observations of LeRobot's own simulators, written to an .npz file: `python lerobot_simulators.py NAME SITE_PACKAGES FILE`.

Runs in LeRobot's Python; the simulators come from the site-packages of theirs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from rlhpc.runtime.torch_adapter import import_torchvision

import_torchvision()
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (3, 7)).astype(np.float32)


def libero() -> dict[str, Any]:
    """Task 2 of LIBERO-Spatial from its initial states 1 and 2, as LeRobot's environment and processor give them."""
    import torch
    from lerobot.envs import libero as simulators
    from lerobot.envs.utils import preprocess_observation
    from lerobot.processor.env_processor import LiberoProcessorStep
    from libero.libero import benchmark

    suite = benchmark.get_benchmark_dict()["libero_spatial"]()
    size = {"observation_width": 64, "observation_height": 64}
    # The pinned package has the same states in files of another format, and reads them itself.
    simulators.get_task_init_states = lambda suite, task: suite.get_task_init_states(task)
    env = simulators.LiberoEnv(suite, 2, "libero_spatial", obs_type="pixels_agent_pos", episode_index=1, **size)
    shown = LiberoProcessorStep()
    frames, states = [], []

    def show(obs: dict[str, Any]) -> None:
        batch = {"pixels": obs["pixels"], "robot_state": obs["robot_state"]}
        seen = shown.observation(preprocess_observation(_batch_of_one(batch)))
        views = [(seen[f"observation.images.{name}"][0] * 255).round().to(torch.uint8) for name in ("image", "image2")]
        frames.append(torch.cat(views).permute(1, 2, 0).numpy())
        states.append(seen["observation.state"][0].numpy())

    for _ in range(2):
        show(env.reset(seed=0)[0])
        for action in ACTIONS:
            show(env.step(action)[0])
    return {"rgb": np.stack(frames), "state": np.stack(states), "actions": ACTIONS}


def metaworld() -> dict[str, Any]:
    """A picture of reach-v3, from the camera where MetaWorld has it, as LeRobot turns it."""
    from lerobot.envs.metaworld import MetaworldEnv

    env = MetaworldEnv("reach-v3", obs_type="pixels")
    return {"shown": env.render(), "raw": env._env.render()}


def _batch_of_one(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _batch_of_one(value) for key, value in part.items()}
    return np.asarray(part)[None]


if __name__ == "__main__":
    _, name, packages, file = sys.argv
    sys.path.append(packages)
    os.environ.setdefault("MUJOCO_GL", "egl")
    np.savez(file, **{"libero": libero, "metaworld": metaworld}[name]())
    os._exit(0)  # destructors of the renderers complain
