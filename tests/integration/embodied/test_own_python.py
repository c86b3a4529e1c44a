"""Simulators with a Python of their own, which RLHPC_METAWORLD_PYTHON and RLHPC_LIBERO_PYTHON name (see the how-to)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.observations import decode_text
from rlhpc.runtime.errors import ConfigError
from tests import warm

METAWORLD = os.environ.get("RLHPC_METAWORLD_PYTHON")
LIBERO = os.environ.get("RLHPC_LIBERO_PYTHON")
metaworld = pytest.mark.skipif(not METAWORLD, reason="RLHPC_METAWORLD_PYTHON names no Python")
libero = pytest.mark.skipif(not LIBERO, reason="RLHPC_LIBERO_PYTHON names no Python")


def build(env_type: str, env_id: str, python: str | None, num_envs: int = 2, **changes: Any) -> Any:
    section = EnvSideConfig(env_type=env_type, env_id=env_id, simulator_python=python, **changes)
    return make_env(OmegaConf.structured(section), num_envs, seed=3)


@pytest.mark.parametrize("env_type", ["metaworld", "libero"])
def test_what_is_missing_is_named(env_type: str) -> None:
    pytest.importorskip("mujoco")  # rlhpc's own environment has neither
    with pytest.raises(ConfigError, match=rf"a Python of its own: see envs/{env_type}\.txt"):
        build(env_type, "reach-v3", None)


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"simulator_python is '/no/python', which cannot be started: No such file"):
        build("gymnasium", "CartPole-v1", "/no/python")


@metaworld
def test_metaworld() -> None:
    env = build("metaworld", "reach-v3", METAWORLD, simulators=2, max_episode_steps=15)
    try:
        obs, _ = env.reset()
        assert obs.shape == (2, 39) and env.observation_space.shape == (39,) and (obs[0, -3:] != obs[1, -3:]).any()
        actions = np.random.default_rng(0).uniform(-1, 1, (40, 2, 4)).astype(np.float32)
        steps = [env.step(row) for row in actions[:20]]
        assert steps[14][3].all() and (steps[14][4]["episode"]["length"] == 15).all()
        assert set(steps[14][4]["episode"]) >= {"success_once", "success_at_end"}
        frames = env.render()
        assert frames.shape == (2, 480, 480, 3) and frames.std() > 10
        resumed = build("metaworld", "reach-v3", METAWORLD, simulators=1, max_episode_steps=15)
        try:
            resumed.load_state_dict(env.state_dict())
            for row in actions[20:]:
                for x, y in zip(env.step(row)[:4], resumed.step(row)[:4], strict=True):
                    np.testing.assert_array_equal(x, y)
        finally:
            resumed.close()
    finally:
        env.close()
    with pytest.raises(ConfigError, match="did you mean reach-v3"):
        build("metaworld", "reach-v4", METAWORLD)


@metaworld
@pytest.mark.parametrize("way", ["simulator_python", "python_interpreter"])
def test_a_run_and_its_evaluation(tmp_path: Path, way: str) -> None:
    root = Path(__file__).resolve().parents[3]
    config = {
        "defaults": [str(root / "configs/base/ppo.yaml")],
        "runner": {"name": "reach", "run_dir": str(tmp_path), "max_steps": 2},
        "algorithm": {"rollout_steps": 16, "update_epochs": 1},
        "actor": {"global_batch_size": 64},
        "env": {"train": {"env_type": "metaworld", "env_id": "reach-v3", "num_envs": 4, "max_episode_steps": 12}},
    }  # fmt: skip
    config["env"]["eval"] = {"env_type": "metaworld", "num_envs": 2, "num_episodes": 2}
    if way == "simulator_python":
        config["env"]["train"][way] = METAWORLD
    else:
        config["cluster"] = {
            "node_groups": [{"label": "sim", "node_ranks": 0, way: METAWORLD}],
            "component_placement": {"actor,rollout": 0, "env": {"node_group": "sim", "placement": 0}},
        }
    (tmp_path / "reach.yaml").write_text(json.dumps(config))
    rlhpc = [sys.executable, "-m", "rlhpc.cli"]
    warm.run([*rlhpc, "train", str(tmp_path / "reach.yaml")], check=True, cwd=root, timeout=240)
    if way == "simulator_python":
        done = [*rlhpc, "eval", "--run", str(tmp_path / "reach"), "--step", "latest"]
        refused = warm.run(done, cwd=root, timeout=240, capture_output=True, text=True)
        assert (
            refused.returncode == 2
            and "simulator_python" in refused.stderr
            and "--trust-checkpoint-code" in refused.stderr
        )
        done += ["--trust-checkpoint-code"]  # it starts a program that the checkpoint names
        warm.run(done, check=True, cwd=root, timeout=240)
        found = json.loads(next((tmp_path / "reach/eval").rglob("*.json")).read_text())
        assert found["episodes"] == 2 and "success_once" in found


@libero
@pytest.mark.slow
def test_libero() -> None:
    env = build("libero", "libero_spatial", LIBERO, num_envs=1, max_episode_steps=3, simulator_timeout_s=280.0)
    try:
        obs, _ = env.reset()
        assert obs["rgb"].shape == (1, 128, 128, 6) and obs["rgb"].std() > 10 and obs["state"].shape == (1, 8)
        assert "black bowl" in decode_text(obs["instruction"][0])
        for _ in range(3):
            obs, _, _, truncations, infos = env.step(np.full((1, 7), 0.5, np.float32))
        assert truncations.all() and infos["episode"]["success_once"].tolist() == [0]
        assert (infos["final_obs"]["state"] != obs["state"]).any()
        assert env.render().shape == (1, 128, 128, 3)
    finally:
        env.close()
    with pytest.raises(ConfigError, match="did you mean libero_spatial"):
        build("libero", "libero_spacial", LIBERO)
