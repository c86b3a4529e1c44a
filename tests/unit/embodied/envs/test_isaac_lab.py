"""Isaac Lab's interface and mjlab's: final observations, resets within a step and from outside.

Isaac Lab needs a GPU and Isaac Sim. `Managed` and `Direct` stand in for its environments: their `step` does what Isaac Lab's
does, in its order. mjlab simulates on the CPU, in a Python of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.isaac_lab import IsaacLabEnv
from rlhpc.embodied.envs.tensor_env import TensorVectorEnv
from rlhpc.runtime.errors import ConfigError
from tests.extras import find_python, needs_python

ROOT = Path(__file__).parents[4]
CPU = torch.device("cpu")
TASK, DIRECT = "Isaac-StandIn-v0", "Isaac-StandIn-Direct-v0"


class Managed:
    """Slots that count; one ends at a number that it drew, another time limit is 9. Observations share one memory."""

    max_episode_length = 9

    def __init__(self, cfg: Any) -> None:
        self.num_envs = cfg.num_envs
        self.single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.count, self.end, self.episode = (torch.zeros(self.num_envs, dtype=torch.int64) for _ in range(3))
        self.buffer = torch.zeros(self.num_envs, 3)
        self.calls: list[str] = []
        note = self.calls.append
        self.scene = SimpleNamespace(write_data_to_sim=lambda: note("write"))
        self.sim = SimpleNamespace(forward=lambda: note("forward"))
        self.observation_manager = SimpleNamespace(compute=self.compute)

    def compute(self, update_history: bool = False) -> dict[str, Any]:
        self.buffer[:, 0], self.buffer[:, 1], self.buffer[:, 2] = self.count, self.episode, self.end
        return {"policy": self.buffer, "critic": {"count": self.buffer[:, :1], "end": self.buffer[:, 2:]}}

    @staticmethod
    def seed(seed: int = -1) -> int:
        torch.manual_seed(seed)
        return seed

    def _reset_idx(self, indices: Tensor) -> None:
        self.calls.append(f"reset {indices.tolist()}")
        self.count[indices] = 0
        self.episode[indices] += 1
        self.end[indices] = torch.randint(2, 13, (len(indices),))

    def reset(self, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        self._reset_idx(torch.arange(self.num_envs))
        return self.compute(), {}

    def step(self, action: Tensor) -> Any:
        assert action.shape == (self.num_envs, 2)
        self.count += 1
        terminated, time_outs = self.count >= self.end, self.count >= self.max_episode_length
        rewards = self.count.float()
        indices = (terminated | time_outs).nonzero().squeeze(-1)
        if len(indices):
            self._reset_idx(indices.to(torch.int32))
        return self.compute(update_history=True), rewards, terminated, time_outs & ~terminated, {"log": {}}


class Direct(Managed):
    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        del self.observation_manager

    def _get_observations(self) -> dict[str, Any]:
        return {"policy": self.compute()["policy"]}


@pytest.fixture(autouse=True)
def isaac(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Isaac Lab's modules, with the tasks above; returns the arguments with which its application was started."""
    started: list[dict[str, Any]] = []

    def launch(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(app=object())

    contents: dict[str, dict[str, Any]] = {
        "isaaclab": {}, "isaaclab.app": {"AppLauncher": launch}, "isaaclab_tasks": {},
        "isaaclab_tasks.utils": {"parse_env_cfg": lambda task, device, num_envs: SimpleNamespace(num_envs=num_envs)},
    }  # fmt: skip
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    make = {TASK: Managed, DIRECT: Direct}
    monkeypatch.setattr(gymnasium, "make", lambda task, cfg: SimpleNamespace(unwrapped=make[task](cfg)))
    monkeypatch.setattr(IsaacLabEnv, "_app", None)
    return started


def build(count: int = 6, task: str = TASK, **options: Any) -> TensorVectorEnv:
    kwargs = {"task": task, "groups": ["policy"], **options.pop("kwargs", {})}
    cfg = EnvSideConfig(env_type="tensors", env_id="isaac_lab", num_envs=count, kwargs=kwargs, **options)
    return TensorVectorEnv(cfg, count, 0, 3, CPU)


@pytest.mark.parametrize("task", [TASK, DIRECT])
def test_an_episodes_last_observation_is_read_where_the_simulator_resets(task: str) -> None:
    env, ends = build(task=task), {"terminated": 0, "truncated": 0}
    obs, _ = env.reset()
    assert env.max_episode_steps == 9 and (obs[:, 0] == 0).all()
    for _ in range(40):
        before = obs
        obs, rewards, terminations, truncations, infos = env.step(np.zeros((6, 1, 2), np.float32))
        done = terminations | truncations
        assert (rewards == before[:, 0] + 1).all()
        assert (terminations == (before[:, 0] + 1 >= before[:, 2])).all()
        assert (truncations == ((before[:, 0] + 1 >= 9) & ~terminations)).all()
        assert (obs[:, 0] == np.where(done, 0, before[:, 0] + 1)).all(), "the first observation of the next episode"
        assert (obs[:, 1] == before[:, 1] + done).all(), "a slot is reset once"
        if done.any():
            final = infos["final_obs"][done]
            assert (final[:, 0] == before[done, 0] + 1).all() and (final[:, 1:] == before[done, 1:]).all()
        ends["terminated"] += terminations.sum()
        ends["truncated"] += truncations.sum()
    assert min(ends.values()) > 2


def test_a_limit_below_the_simulators_resets_slots_from_outside() -> None:
    env = build(max_episode_steps=4)
    env.reset()
    lab: Any = env._env
    for _ in range(4):
        lab.env.calls.clear()
        count = lab.env.count.clone()
        obs, _, terminations, truncations, infos = env.step(np.zeros((6, 1, 2), np.float32))
        if truncations.any():
            assert (infos["final_obs"][truncations, 0] == count[torch.from_numpy(truncations)].numpy() + 1).all()
            assert lab.env.calls[-2:] == ["write", "forward"]
    assert truncations.any() and (obs[terminations | truncations, 0] == 0).all()


def test_a_chunk_goes_on_after_an_end_and_the_next_begins_anew() -> None:
    env = build()
    obs, _ = env.reset()
    for _ in range(6):
        before = obs
        obs, _, terminations, truncations, infos = env.chunk_step(np.zeros((6, 4, 2), np.float32))
        done = terminations | truncations
        length = np.minimum(np.minimum(before[:, 2], 9) - before[:, 0], 4)
        assert (infos["chunk"]["mask"].sum(1) == length).all()
        assert (obs[:, 0] == np.where(done, 0, before[:, 0] + 4)).all()
        if done.any():
            assert (infos["final_obs"][done, 0] == (before[:, 0] + length)[done]).all()


def test_a_reset_of_all_slots_follows_from_the_seed() -> None:
    env, again, other = build(), build(), build()
    starts = [each.reset(seed=seed)[0][:, 2] for each, seed in ((env, 5), (again, 5), (other, 6))]
    assert np.array_equal(starts[0], starts[1]) and not np.array_equal(starts[0], starts[2])


def test_groups_of_observations_and_bounds_of_actions(isaac: list[dict[str, Any]]) -> None:
    env = build(kwargs={"groups": None, "action_limit": 2.0})
    assert sorted(env.observation_space) == ["critic_count", "critic_end", "policy"]
    assert env.observation_space["critic_end"].shape == (1,) and float(env.action_space.high[0]) == 2.0
    assert env.reset()[0]["critic_count"].shape == (6, 1) and not env.supports_state
    assert build().observation_space.shape == (3,) and np.isinf(build().action_space.low).all()
    with pytest.raises(ConfigError, match=r"kwargs\.groups names pictures, and Isaac-StandIn-v0 has policy, critic"):
        build(kwargs={"groups": ["pictures"]})
    assert isaac == [{"headless": True, "device": "cpu"}], "a process has one application"


def test_a_python_without_it_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isaaclab", None)
    monkeypatch.delitem(sys.modules, "isaaclab.app")
    with pytest.raises(ConfigError, match=r"env_id isaac_lab needs Isaac Lab .*Isaac Sim"):
        build()


def test_mjlab_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mjlab", None)
    cfg = EnvSideConfig(env_type="tensors", env_id="mjlab", num_envs=2, kwargs={"task": "Mjlab-Cartpole-Balance"})
    with pytest.raises(ConfigError, match=r"env_id mjlab needs mjlab .*rlhpc\[mjlab\]"):
        TensorVectorEnv(cfg, 2, 0, 3, CPU)


@pytest.mark.long
@needs_python("mjlab")
def test_mjlab_on_a_cpu() -> None:
    command = [find_python("mjlab"), "-m", "tests.unit.embodied.envs.mjlab_program"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["actions"] == [1] and report["repeated"] and report["ended_at_limit"] and report["finite"]
    assert report["final_differs"] and report["final_error"] < 1e-5
    assert report["chunk"] == [6] * 4 and report["chunk_final_error"] < 1e-5
    assert "did you mean Mjlab-Cartpole-Balance" in report["unknown"]
