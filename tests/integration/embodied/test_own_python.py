"""Simulators with a Python of their own: `make setup-metaworld`, `make setup-libero` (see the how-to).

With that of `make setup-lerobot`, LeRobot's own versions of both simulators say what policies see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.observations import decode_text, orient
from rlhpc.runtime.errors import ConfigError
from tests import warm
from tests.extras import find_python, need_extra, needs_python

METAWORLD, LIBERO, LEROBOT = find_python("metaworld"), find_python("libero"), find_python("lerobot")


def build(
    env_type: str, env_id: str, python: str | None, num_envs: int = 2, slot_offset: int = 0, stage: str = "train",
    **changes: Any,
) -> Any:  # fmt: skip
    section = EnvSideConfig(env_type=env_type, env_id=env_id, simulator_python=python, **changes)
    return make_env(OmegaConf.structured(section), num_envs, slot_offset, seed=3, stage=stage)


@pytest.mark.parametrize("env_type", ["metaworld", "libero"])
def test_what_is_missing_is_named(env_type: str) -> None:
    need_extra("embodied")  # rlhpc's own environment has neither
    with pytest.raises(ConfigError, match=rf"a Python of its own: see envs/{env_type}\.txt"):
        build(env_type, "reach-v3", None)


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"simulator_python is '/no/python', which cannot be started: No such file"):
        build("gymnasium", "CartPole-v1", "/no/python")


@needs_python("metaworld")
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


@needs_python("metaworld")
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
        stranger = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "stranger")}
        refused = warm.run(done, cwd=root, timeout=240, capture_output=True, text=True, env=stranger)
        assert (
            refused.returncode == 2
            and "simulator_python" in refused.stderr
            and "--trust-checkpoint-code" in refused.stderr
        )
        warm.run(done, check=True, cwd=root, timeout=240)
        found = json.loads(next((tmp_path / "reach/eval").rglob("*.json")).read_text())
        assert found["episodes"] == 2 and "success_once" in found


@needs_python("libero")
@needs_python("lerobot")
@pytest.mark.long
def test_libero_shows_what_lerobot_shows(tmp_path: Path) -> None:
    """Two episodes of task 2 from its initial states 1 and 2, by LeRobot's own environment and processor: the same bits of
    pictures from both cameras, the same state, the same steps before the first observation. So are they when resumed."""
    outside = lerobot_shows("libero", LIBERO, tmp_path)
    kwargs = {"width": 64, "height": 64, "task_ids": [2]}
    # Slot 1 of one that enumerates begins with the second pair; the next of slot 2 is another evaluation's.
    for slot in (1, 2):
        env = build(
            "libero", "libero_spatial", LIBERO, num_envs=1, slot_offset=slot, stage="eval", kwargs=kwargs,
            simulator_timeout_s=280.0,
        )  # fmt: skip
        try:
            obs, _ = env.reset()
            shown = [obs]
            for action in outside["actions"]:
                if slot == 2 and len(shown) == 2:
                    state = env.state_dict()
                    env.reset()  # another episode
                    env.load_state_dict(state)
                shown.append(env.step(action[None])[0])
        finally:
            env.close()
        begin = (slot - 1) * len(shown)
        for step, obs in enumerate(shown):
            np.testing.assert_array_equal(obs["rgb"][0], outside["rgb"][begin + step])
            np.testing.assert_allclose(obs["state"][0], outside["state"][begin + step], atol=2e-6)
        assert "black bowl" in decode_text(obs["instruction"][0]) and obs["rgb"].std() > 10


@pytest.mark.long
@needs_python("metaworld")
@needs_python("lerobot")
def test_metaworld_turns_pictures_as_lerobot_does(tmp_path: Path) -> None:
    outside = lerobot_shows("metaworld", METAWORLD, tmp_path)
    np.testing.assert_array_equal(orient(outside["raw"], "rotate_180"), outside["shown"])
    shown = []
    for kwargs in ({}, {"image_orientation": "raw"}):
        env = build("metaworld", "reach-v3", METAWORLD, num_envs=1, kwargs=kwargs)
        try:
            env.reset()
            shown.append(env.render()[0])
        finally:
            env.close()
    np.testing.assert_array_equal(shown[0], shown[1][::-1, ::-1])


def lerobot_shows(name: str, python: str, folder: Path) -> dict[str, np.ndarray]:
    """What `lerobot_simulators.py` writes."""
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    script, file = Path(__file__).with_name("lerobot_simulators.py"), folder / f"{name}.npz"
    root = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, "PYTHONPATH": root}
    subprocess.run([LEROBOT, str(script), name, packages, str(file)], check=True, timeout=400, env=env)
    return dict(np.load(file))


@needs_python("libero")
def test_the_tasks_of_liberos_suites() -> None:
    spatial, everything = (
        build("libero", name, LIBERO, num_envs=1, simulators=1) for name in ("libero_spatial", "libero_130")
    )
    try:
        assert len(everything.task_names) == len(set(everything.task_names)) == 130
        assert everything.task_names[:10] == spatial.task_names
        assert everything.observation_space == spatial.observation_space
    finally:
        spatial.close()
        everything.close()


@needs_python("libero")
@pytest.mark.long
def test_libero() -> None:
    env = build("libero", "libero_spatial", LIBERO, num_envs=1, max_episode_steps=3, simulator_timeout_s=280.0)
    try:
        obs, _ = env.reset()
        assert obs["rgb"].shape == (1, 256, 256, 6) and obs["rgb"].std() > 10 and obs["state"].shape == (1, 8)
        for _ in range(3):
            obs, _, _, truncations, infos = env.step(np.full((1, 7), 0.5, np.float32))
        assert truncations.all() and infos["episode"]["success_once"].tolist() == [0]
        assert (infos["final_obs"]["state"] != obs["state"]).any()
        assert env.render().shape == (1, 256, 256, 3)
    finally:
        env.close()
    with pytest.raises(ConfigError, match="did you mean libero_spatial"):
        build("libero", "libero_spacial", LIBERO)
