"""RLinf's simulator classes, on a stand-in of its package: the order of calls, what is shown, and what is counted.

The stand-in has the interface of RLinf's classes and the form of their results (envs/calvin/calvin_gym_env.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.config.envs import RolloutEnvConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.observations import decode_text
from rlhpc.runtime.errors import ConfigError

ENVS = '''
import numpy as np
import torch

class World:
    """Counts up from a drawn start; the reward is the action, and success ends an episode."""

    def __init__(self, cfg, num_envs, seed_offset, total_num_processes, worker_info):
        self.cfg, self.num_envs, self.place = cfg, num_envs, (seed_offset, total_num_processes)
        self._generator = np.random.default_rng(cfg.seed + seed_offset)
        self.calls, self.is_start = [], True
        self.update_reset_state_ids()

    def update_reset_state_ids(self):
        self.calls.append("update")
        drawn = self._generator.integers(100, size=self.num_envs // self.cfg.group_size)
        self.states = drawn.repeat(self.cfg.group_size)

    def _obs(self):
        size = self.cfg.get("wrist_size", 4)
        return {
            "states": torch.stack([torch.tensor(self.start), torch.tensor(self.elapsed)], 1),
            "main_images": self._main(),
            "wrist_images": torch.full((self.num_envs, 2, size, size, 3), 9, dtype=torch.uint8),
            "extra_view_images": None,
            "task_descriptions": [f"reach {i}" for i in range(self.num_envs)],
        }

    def _main(self):
        if self.cfg.get("channels_first"):  # as RoboVerse's, in floats up to 1
            return torch.arange(3).view(3, 1, 1).expand(self.num_envs, 3, 4, 5) / 255
        return torch.full((self.num_envs, 4, 4, 3), 7, dtype=torch.uint8)

    def reset(self):
        self.calls.append(("reset", self.is_start))
        self.start, self.elapsed = self.states.copy(), np.zeros(self.num_envs, int)
        self.returns, self.is_start = np.zeros(self.num_envs), False
        return self._obs(), {}

    def chunk_step(self, actions):
        self.actions = actions
        rewards, chunk = torch.as_tensor(actions[..., 0]).float(), actions.shape[1]
        self.elapsed += chunk
        self.returns += rewards.sum(1).numpy()
        terminated = (rewards >= 5).any(1) & (not self.cfg.ignore_terminations)
        truncated = torch.tensor(self.elapsed >= self.cfg.max_episode_steps)
        ends = torch.zeros(self.num_envs, chunk, dtype=bool)
        terminations, truncations = ends.clone(), ends.clone()
        terminations[:, -1], truncations[:, -1] = terminated, truncated
        obs, infos, done = self._obs(), {}, (terminated | truncated).numpy()
        if done.any():
            assert self.cfg.auto_reset
            episode = {
                "return": torch.tensor(self.returns.copy()), "episode_len": torch.tensor(self.elapsed.copy()),
                "success_once": terminated,
            }
            infos = {"final_observation": obs, "final_info": {"episode": episode}}
            self.start[done] += 1
            self.elapsed[done], self.returns[done] = 0, 0
            obs = self._obs()
        return [obs], rewards, terminations, truncations, [infos]

def get_env_cls(name, cfg):
    if name != "world":
        raise ValueError(f"{name!r} is not a valid SupportedEnvType")
    return World
'''
ACTIONS = """
def prepare_actions(raw_chunk_actions, env_type, model_type, num_action_chunks, action_dim, policy, wm_env_type, env_cfg):
    assert (env_type, num_action_chunks, action_dim) == ("world", raw_chunk_actions.shape[1], 2)
    return raw_chunk_actions * (10 if model_type == "openpi" else 1)
"""


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packages" / "rlinf" / "envs"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(ENVS)
    (folder / "action_utils.py").write_text(ACTIONS)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for name in [name for name in sys.modules if name.split(".")[0] == "rlinf"]:
        monkeypatch.delitem(sys.modules, name)


def build(num_envs: int = 4, slot_offset: int = 0, **changes: Any) -> Any:
    values = {"num_envs": 4, "group_size": 2, "max_episode_steps": 6, **changes}
    kwargs = {"action_dim": 2, "section": {"init_params": {"max_episode_steps": 99}}, **values.pop("kwargs", {})}
    return make_env(
        RolloutEnvConfig(env_type="rlinf", env_id="world", kwargs=kwargs, **values), num_envs, slot_offset, seed=3
    )


def test_observations_are_rlinfs() -> None:
    env = build()
    assert env.observation_space["state"].shape == (2,) and env.action_space == spaces.Box(-np.inf, np.inf, (2,))
    obs, _ = env.reset()
    assert obs["rgb"].shape == (4, 4, 4, 9) and obs["rgb"].dtype == np.uint8
    assert obs["rgb"][0, 0, 0].tolist() == [7] * 3 + [9] * 6
    assert decode_text(obs["instruction"][2]) == "reach 2"
    assert obs["state"].dtype == np.float32 and (obs["state"][0::2] == obs["state"][1::2]).all(), "a group starts alike"
    numbers = build(kwargs={"observations": ["states"]})
    assert numbers.reset()[0].shape == (4, 2)
    apart = build(kwargs={"section": {"wrist_size": 2}})
    assert set(apart.observation_space.spaces) == {"state", "main_images", "wrist_images", "instruction"}
    assert apart.observation_space["wrist_images"].shape == (2, 2, 6)


def test_images_of_any_layout_are_the_same_to_the_policy() -> None:
    obs = build(kwargs={"section": {"channels_first": True}}).reset()[0]
    assert obs["main_images"].shape == (4, 4, 5, 3) and obs["main_images"].dtype == np.uint8
    assert obs["main_images"][0, 0, 0].tolist() == [0, 1, 2]


def test_the_policy_sees_the_cameras_and_components_that_rlinfs_does() -> None:
    env = build(kwargs={"max_cameras": 2, "state_components": [[1], [0, 1], [0]]})
    obs, _ = env.reset()
    env.step(np.zeros((4, 2), np.float32))
    seen, states = env._last_obs["state"], env._env._obs()["states"].numpy()
    assert obs["rgb"].shape == (4, 4, 4, 6) and (states[:, 1] == 1).all()
    assert (seen == np.stack([states[:, 1], states.sum(1), states[:, 0]], 1)).all()
    with pytest.raises(ConfigError, match=r"state_components has 2; the states of world have 2 components"):
        build(kwargs={"state_components": [[2]]})
    with pytest.raises(ConfigError, match=r"state_components has \[-1\]; allowed: lists of components from 0 on"):
        build(kwargs={"state_components": [[-1]]})


def test_a_gripper_gets_the_sign_of_its_action() -> None:
    env = build(kwargs={"sign_actions": [1]})
    env.reset()
    chunk = np.array([0.3, -0.2], np.float32) * np.ones((4, 2, 1), np.float32)
    env.chunk_step(chunk)
    assert env._env.actions[0].tolist() == [[pytest.approx(0.3), -1.0]] * 2
    assert chunk[0, 0, 1] == np.float32(-0.2), "the policy's own action is kept"


def test_a_rollout_begins_as_in_rlinfs_env_worker() -> None:
    env = build()
    first = env.reset(seed=11)[0]["state"]
    again = env.reset(seed=11)[0]["state"]
    assert (first == again).all() and not (env.reset(seed=12)[0]["state"] == first).all()
    assert env._env.calls[-2:] == ["update", ("reset", True)]
    half = build(num_envs=2, slot_offset=2)
    assert half._env.place == (1, 2) and half._env.num_envs == 2


def test_a_chunk_ends_episodes_and_counts_as_a_whole() -> None:
    env = build(reward_scale=0.5)
    env.reset()
    actions = np.zeros((4, 3, 2), np.float32)
    actions[1, 0, 0], actions[2, :, 0] = 5, 1
    obs, rewards, terminated, truncated, infos = env.chunk_step(actions)
    assert rewards.tolist() == [0, 2.5, 1.5, 0]
    assert terminated.tolist() == [False, True, False, False] and not truncated.any()
    assert infos["chunk"]["rewards"][2].tolist() == [0.5, 0.5, 0.5] and infos["chunk"]["mask"].all()
    episode = infos["episode"]
    assert episode["mask"].tolist() == terminated.tolist()
    assert (episode["return"][1], episode["length"][1], episode["success_once"][1]) == (5, 3, 1)
    assert infos["final_obs"]["state"][1, 1] == 3 and obs["state"][1, 1] == 0
    *_, truncated, infos = env.chunk_step(np.zeros((4, 3, 2), np.float32))
    assert truncated.tolist() == [True, False, True, True], "slot 1 began again"


def test_settings_of_the_run_reach_rlinfs_section() -> None:
    section = build(use_rel_reward=True, ignore_terminations=True, kwargs={"section": {"reward_coef": 5.0}})._env.cfg
    assert (section.use_rel_reward, section.ignore_terminations, section.reward_coef) == (True, True, 5.0)
    assert (section.seed, section.group_size, section.max_episode_steps, section.auto_reset) == (3, 2, 6, True)
    assert section.video_cfg.save_video is False
    assert build()._env.cfg.init_params.max_episode_steps == 6


def test_actions_are_prepared_by_rlinf() -> None:
    env = build(kwargs={"model_type": "openpi"})
    env.reset()
    assert env.step(np.full((4, 2), 0.1, np.float32))[1].tolist() == pytest.approx([1.0] * 4)


def test_a_missing_rlinf_or_simulator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="env_id is 'moon', which RLinf does not provide here"):
        make_env(
            RolloutEnvConfig(env_type="rlinf", env_id="moon", max_episode_steps=6, kwargs={"action_dim": 2}), 1, seed=0
        )
    monkeypatch.setitem(sys.modules, "rlinf.envs", None)
    with pytest.raises(ConfigError, match=r"name RLinf's own Python as env\.train\.simulator_python"):
        build()
