"""A task of mjlab in the Python that has it: `python -m tests.unit.embodied.envs.mjlab_program` prints findings as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.tensor_env import TensorVectorEnv
from rlhpc.runtime.errors import ConfigError

CPU = torch.device("cpu")
SLOTS, LIMIT = 4, 6


def build(task: str = "Mjlab-Cartpole-Balance") -> TensorVectorEnv:
    options: dict[str, Any] = {"max_episode_steps": LIMIT, "kwargs": {"task": task, "groups": ["actor"]}}
    cfg = EnvSideConfig(env_type="tensors", env_id="mjlab", num_envs=SLOTS, **options)
    return TensorVectorEnv(cfg, SLOTS, 0, 3, CPU)


def main() -> None:
    torch.set_num_threads(1)
    env = build()
    report: dict[str, Any] = {"obs": list(env.observation_space.shape), "actions": list(env.action_space.shape)}
    actions = np.random.default_rng(0).uniform(-1, 1, (20, SLOTS, 1, *env.action_space.shape)).astype(np.float32)
    plays = []
    for _ in range(2):
        rows = [env.reset(seed=5)[0]]
        for row in actions[: LIMIT + 2]:
            obs, rewards, terminations, truncations, infos = env.step(row)
            rows += [obs, rewards, terminations | truncations, infos.get("final_obs", obs)]
        plays.append(rows)
    report["repeated"] = all(np.array_equal(one, other) for one, other in zip(*plays, strict=True))
    done, obs, final = plays[0][4 * LIMIT - 1], plays[0][4 * LIMIT - 3], plays[0][4 * LIMIT]
    report["ended_at_limit"] = bool(done.all())
    report["final_differs"] = bool((np.abs(final - obs).max(1) > 1e-6).all())
    # The final observation is what a single slot, whose episode goes on, shows after as many steps.
    env.max_episode_steps = 0
    env.reset(seed=5)
    for row in actions[:LIMIT]:
        going_on = env.step(row)[0]
    report["final_error"] = float(np.abs(going_on - final).max())
    env.max_episode_steps = LIMIT
    env.reset(seed=5)
    chunk = env.chunk_step(actions[: LIMIT + 2, :, 0].swapaxes(0, 1))
    report["chunk"] = chunk[4]["chunk"]["mask"].sum(1).tolist()
    report["chunk_final_error"] = float(np.abs(chunk[4]["final_obs"] - final).max())
    report["finite"] = bool(np.isfinite(chunk[0]).all())
    try:
        build("Mjlab-Cartpole-Balanc")
    except ConfigError as error:
        report["unknown"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
