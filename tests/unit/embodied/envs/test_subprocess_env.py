"""Simulator processes: the same data as without, and what a dead, hung or raising one costs. Nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs import subprocess_env as processes
from rlhpc.runtime.errors import ConfigError, RlhpcError
from tests import warm

MODULE = """
import os, time
import numpy as np
from gymnasium import spaces
from rlhpc.embodied.envs import VectorEnv

class Walk(VectorEnv):
    '''Walks to the right. Told to by an action, a slot's simulator dies, hangs or raises.'''

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, cfg, num_envs, slot_offset, seed):
        self.num_envs, self.x, self.seed = num_envs, np.zeros(num_envs), seed
        if cfg.kwargs.get("broken"):
            raise RuntimeError("this one never starts")

    def observe(self):
        return np.stack([self.x, np.full(self.num_envs, os.getpid())], 1).astype(np.float32)

    def reset(self, seed=None):
        self.x[:] = 0
        return self.observe(), {}

    def step(self, actions):
        told = float(actions.max())
        if told == 1:
            os.kill(os.getpid(), 11)
        if told == 2:
            time.sleep(1000)
        if told == 3:
            raise FloatingPointError("the physics blew up")
        self.x += 1
        no = np.zeros(self.num_envs, bool)
        return self.observe(), np.ones(self.num_envs, np.float32), no, no, {}
"""


def section(**changes: Any) -> Any:
    return OmegaConf.structured(EnvSideConfig(**{"env_id": "CartPole-v1", "simulators": 2, **changes}))


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Five slots in two processes, of somebody else's class, that are given 2 s to answer.

    They are not started warm: the kernel takes longer than that to end a process with so much in memory by signal 11.
    """
    monkeypatch.setattr(processes, "subprocess", subprocess)
    (tmp_path / "walk_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env(section(env_type="walk_env:Walk", env_id="walk", simulator_timeout_s=2.0), 5)
    yield env
    env.close()


def test_the_same_data_whatever_the_number_of_processes() -> None:
    envs = [make_env(section(simulators=n, max_episode_steps=20), 5, seed=3) for n in (0, 1, 3)]
    try:
        firsts = [env.reset()[0] for env in envs]
        rng = np.random.default_rng(0)
        for _ in range(50):
            actions = rng.integers(0, 2, (5, 2, 1))
            steps = [env.chunk_step(actions) for env in envs]
            for step in steps[1:]:
                for one, other in zip(steps[0][:4], step[:4], strict=True):
                    np.testing.assert_array_equal(one, other)
                assert (steps[0][4].get("episode") is None) == (step[4].get("episode") is None)
                if "episode" in step[4]:
                    np.testing.assert_array_equal(steps[0][4]["episode"]["return"], step[4]["episode"]["return"])
        assert all((first == firsts[0]).all() for first in firsts)
        states = [env.state_dict() for env in envs]
        envs[2].load_state_dict(envs[2].merge_states([envs[0].slot_state(states[0], i) for i in range(5)]))
        actions = rng.integers(0, 2, (5, 1, 1))
        np.testing.assert_array_equal(envs[0].chunk_step(actions)[0], envs[2].chunk_step(actions)[0])
    finally:
        for env in envs:
            env.close()


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["killed", "stopped", "crashed", "hung", "raised"])
def test_a_lost_simulator_costs_its_slots_episodes(walk: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    obs, _ = walk.reset()
    pids = obs[:, 1].astype(int)
    still = np.zeros((5, 1, 1), np.float32)
    walk.chunk_step(still)
    before = walk.chunk_step(still)[0]
    actions = still.copy()
    if how in ("killed", "stopped"):
        os.kill(int(pids[0]), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    else:
        actions[0] = {"crashed": 1, "hung": 2, "raised": 3}[how]
    obs, rewards, terminations, truncations, infos = walk.chunk_step(actions)
    lost = pids == pids[0]
    assert 0 < lost.sum() < 5
    np.testing.assert_array_equal(truncations, lost)
    np.testing.assert_array_equal(infos["lost"], lost)
    assert not terminations.any() and not rewards[lost].any() and (rewards[~lost] == 1).all()
    assert not infos["episode"]["mask"].any()
    np.testing.assert_array_equal(infos["final_obs"][lost], before[lost])
    assert (obs[lost, 0] == 0).all() and (obs[~lost, 0] == 3).all()
    assert (obs[lost, 1] != pids[lost]).all() and (obs[~lost, 1] == pids[~lost]).all()
    assert walk.restarts == 1 and not psutil.pid_exists(int(pids[0]))
    obs, _, _, truncations, infos = walk.chunk_step(still)
    assert not truncations.any() and obs[:, 0].tolist() == np.where(lost, 1, 4).tolist()
    assert {"killed": "signal 9", "stopped": "hung", "crashed": "signal 11", "hung": "hung", "raised": "blew up"}[
        how
    ] in caplog.text


@pytest.mark.chaos
def test_one_that_fails_again_and_again_ends_the_run(walk: Any) -> None:
    walk.reset()
    with pytest.raises(RlhpcError, match=r"slots 0-1 failed 4 times in a row: it raised"):
        for _ in range(10):
            walk.step(np.full((5, 1), 3, np.float32))


@pytest.mark.chaos
def test_no_simulator_outlives_its_parent_even_a_stopped_one() -> None:
    program = (
        "import os, signal; from omegaconf import OmegaConf; from rlhpc.embodied.config import EnvSideConfig\n"
        "from rlhpc.embodied.envs import make_env\n"
        "env = make_env(OmegaConf.structured(EnvSideConfig(env_id='CartPole-v1', simulators=2)), 2)\n"
        "pids = [simulator.process.pid for simulator in env._simulators]\n"
        "os.kill(pids[0], signal.SIGSTOP); print(*pids, flush=True); signal.pause()\n"
    )
    parent = warm.Popen([sys.executable, "-c", program], stdout=warm.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "walk_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"refuses kwargs .*gravitas"):
        make_env(section(env_id="Pendulum-v1", kwargs={"gravitas": 1}), 2)
    with pytest.raises(RlhpcError, match=r"'walk' raised:(.|\n)*this one never starts(.|\n)*while it started"):
        make_env(section(env_type="walk_env:Walk", env_id="walk", kwargs={"broken": True}), 2)
