"""Plays environments in a Python of their own: `python -m tests.integration.embodied.played SECTIONS.json` prints what it saw.

Of each section two vectors of two slots: the second takes over the first's state, and plays on as that does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv

RNG = np.random.default_rng(0)


def form(obs: Any) -> Any:
    """Shapes and dtypes of an observation of one slot."""
    if isinstance(obs, dict):
        return {key: form(part) for key, part in obs.items()}
    return [str(obs.dtype), *obs.shape[1:]]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two answers to a step are equal, bit for bit. Sums of rewards are nearly: of two PushT of one seed that play the
    same, the areas that are its rewards differ now and then in the last bit."""
    if isinstance(ours, dict):
        return all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, tuple):
        return all(map(same, ours, theirs))
    return bool(np.allclose(ours, theirs, 1e-12, 1e-12) if ours.dtype == np.float64 else np.array_equal(ours, theirs))


def drawn(space: Any) -> np.ndarray:
    """Actions of two slots."""
    if isinstance(space, Discrete):
        return RNG.integers(0, space.n, 2)
    assert isinstance(space, Box)
    return RNG.uniform(space.low, space.high, (2, *space.shape)).astype(space.dtype)


def play(section: dict[str, Any]) -> dict[str, Any]:
    """What one environment shows and does."""
    cfg = OmegaConf.merge(OmegaConf.structured(EnvSideConfig), section)
    env, other = (GymnasiumVectorEnv(cfg, 2, 0, seed) for seed in (1, 2))
    obs, _ = env.reset()
    other.reset()
    ends, finished = 0, []
    for _ in range(20):
        env.step(drawn(env.action_space))
    other.load_state_dict(env.state_dict())
    equal = True
    for _ in range(30):
        actions = drawn(env.action_space)
        ours = env.step(actions)
        equal &= same(ours, other.step(actions))
        ends += int((ours[2] | ours[3]).sum())
        finished += sorted(ours[4].get("episode", {}))
    frames = env.render([1])
    assert frames is not None
    return {"obs": form(obs), "equal": equal, "supports_state": env.supports_state, "ends": ends,
            "reported": sorted(set(finished)), "frames": list(frames.shape), "bright": float(frames.std())}  # fmt: skip


def game(section: dict[str, Any]) -> dict[str, Any]:
    """A whole game: how often the learner saw an end, and what was reported of it."""
    env = GymnasiumVectorEnv(OmegaConf.merge(OmegaConf.structured(EnvSideConfig), section), 1, 0, 1)
    env.reset()
    ends, points, steps = 0, 0.0, 0
    while steps < 3000:
        _, rewards, terminations, truncations, infos = env.step(RNG.integers(0, env.action_space.n, 1))
        ends, points, steps = ends + int((terminations | truncations)[0]), points + float(rewards[0]), steps + 1
        if infos.get("episode", {"mask": [False]})["mask"][0]:
            return {"ends": ends, "steps": steps, "points": points, "length": int(infos["episode"]["length"][0]),
                    "return": float(infos["episode"]["return"][0])}  # fmt: skip
    raise AssertionError("the game does not end")


if __name__ == "__main__":
    sections = json.loads(Path(sys.argv[1]).read_text())
    found = {name: play({**section, "max_episode_steps": 13}) for name, section in sections.items()}
    print(json.dumps(found | {"game": game(sections["breakout"])}))
