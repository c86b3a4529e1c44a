"""A robot as an environment: what it is told, and when it is stopped."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.robots.robot_env import Observation, Robot, RobotVectorEnv, Verdict
from rlhpc.embodied.robots.simulated_robot import SimulatedRobot
from rlhpc.runtime.errors import ConfigError
from tests.eventually import wait_until


class Slider(Robot):
    """A carriage on a rail, which goes where it is told at once, and must not leave the rail."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    control_mode = "velocity"

    def __init__(self, blind_after: int = 10**9, breaks_after: int = 10**9) -> None:
        self.told: list[float] = []
        self.stops, self.looks = 0, 0
        self._blind_after, self._breaks_after = blind_after, breaks_after

    def reset(self, seed: int) -> None:
        """To the middle."""
        self.place, self.looks = np.zeros(1, np.float32), 0
        self._seen_at = time.monotonic()

    def act(self, action: np.ndarray) -> None:
        """Moves."""
        if len(self.told) >= self._breaks_after:
            raise OSError("the wire is cut")
        self.told.append(float(action[0]))
        self.place = self.place + action / 2

    def observe(self) -> Observation:
        """The place."""
        self.looks += 1
        if self.looks <= self._blind_after:
            self._seen_at = time.monotonic()
        return Observation(self.place, self._seen_at)

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """How far to the right it is."""
        return Verdict(float(obs[0]), success=bool(obs[0] > 0.95))

    def stop(self) -> None:
        """Holds."""
        self.stops += 1

    def unsafe(self, obs: Any) -> str:
        """At the rail's left end."""
        return "it is at the end of the rail" if obs[0] < -0.9 else ""


def build(
    slider: Slider | None = None, num_envs: int = 1, limit: int | None = None, resume: str = "auto", **kwargs: Any
) -> Any:
    section = EnvSideConfig(
        env_type="robot", env_id=f"{__name__}:Slider", max_episode_steps=limit,
        kwargs={"hz": 500.0, "resume": resume, **kwargs},
    )  # fmt: skip
    return RobotVectorEnv(OmegaConf.structured(section), num_envs, 0, 3, slider)


def move(env: RobotVectorEnv, to: float) -> Any:
    return env.step(np.float32([[to]]))


def test_commands_stay_within_bounds_and_change_by_little() -> None:
    slider = Slider()
    env = build(slider, max_change=0.75)
    env.reset()
    for wanted in (5.0, 5.0, -5.0, 0.1):
        move(env, wanted)
    assert slider.told == [0.75, 1.0, 0.25, np.float32(0.1)]
    env.close()


def test_episodes_end_by_success_by_their_limit_or_by_a_stop_which_does_not_count() -> None:
    slider = Slider()
    env = build(slider, limit=4, stale_s=60.0)
    env.reset()
    move(env, 1.0)
    obs, rewards, ends, cut, infos = move(env, 1.0)
    assert ends[0] and not cut[0] and rewards[0] == 1 and obs[0, 0] == 0 and infos["final_obs"][0, 0] == 1
    assert (
        infos["episode"]["return"][0] == 1.5
        and infos["episode"]["success_once"][0] == 1
        and infos["episode"]["mask"][0]
    )
    cuts = [bool(move(env, 0.0)[3][0]) for _ in range(4)]
    assert cuts == [False, False, False, True]
    stops = slider.stops
    move(env, -1.0)
    _, rewards, ends, cut, infos = move(env, -1.0)
    assert cut[0] and not ends[0] and rewards[0] == 0 and infos["lost"][0] and not infos["episode"]["mask"][0]
    assert slider.stops == stops + 2  # at once, and before it is brought to the start
    env.close()


def test_it_is_stopped_when_it_shows_nothing_new(caplog: pytest.LogCaptureFixture) -> None:
    env = build(Slider(blind_after=3), stale_s=2.0)
    env.reset()
    seen = [move(env, 0.1) for _ in range(2)]
    assert not any(step[3][0] for step in seen) and env.timing.num_dropped == 0
    step = move(env, 0.0)
    while "its newest observation is " not in caplog.text:
        step = move(env, 0.0)
    assert step[3][0] and step[4]["lost"][0] and env.timing.num_dropped > 3
    env.close()


def test_it_is_held_while_no_command_comes_and_stopped_when_anything_breaks() -> None:
    slider = Slider(breaks_after=1)
    env = build(slider, stale_s=2.0)
    env.reset()
    stops = slider.stops
    move(env, 0.1)
    wait_until(lambda: slider.stops == stops + 1 and env.timing.num_held == 1, 20)
    env.refresh()
    with pytest.raises(OSError, match="the wire is cut"):
        move(env, 0.1)
    assert slider.stops > stops + 1 and env.timing.num_stopped == 1
    env.close()


def test_a_command_that_is_late_finds_it_stopped_or_still_moving() -> None:
    for late in ("keep", "stop"):
        slider = Slider()
        env = build(slider, hz=50.0, stale_s=60.0, late=late)
        env.reset()
        before = slider.stops
        move(env, 0.1)
        if late == "stop":
            wait_until(lambda: slider.stops > before, 20)  # noqa: B023
        time.sleep(0.1)  # five steps
        move(env, 0.1)
        stopped = (env.timing.num_late > 0, env.timing.num_held > 0, slider.stops > before)
        assert stopped == (True, late == "stop", late == "stop")
        env.close()


def test_what_is_said_of_a_mistake() -> None:
    for given, says in (
        ({"num_envs": 2}, "a robot is one slot"),
        ({"hz": 0}, r"kwargs\.hz is 0; it must be a number above 0"),
        (
            {"resume": "never"},
            r"kwargs\.resume is 'never'; after a stop for safety a robot waits for a person, or goes on",
        ),
        ({"late": "wait"}, r"kwargs\.late is 'wait'; a robot may keep to its last command, or stop"),
        ({"color": "red"}, r"refuses kwargs {'color': 'red'}"),
    ):
        with pytest.raises(ConfigError, match=says):
            build(**given)


def test_a_simulated_one_goes_on_in_real_time() -> None:
    section = EnvSideConfig(
        env_type="robot", env_id="rlhpc.embodied.robots.simulated_robot:SimulatedRobot", max_episode_steps=10,
        kwargs={"hz": 100.0, "stale_s": 5.0},
    )  # fmt: skip
    robot = SimulatedRobot("Pendulum-v1", moves_hz=200.0, drop=0.5)
    env = RobotVectorEnv(OmegaConf.structured(section), 1, 0, 3, robot)
    first, _ = env.reset()
    returns = [step[4]["episode"]["return"][0] for step in (move(env, 2.0) for _ in range(20)) if "episode" in step[4]]
    assert len(returns) == 2 and all(value < 0 for value in returns) and first.shape == (1, 3)
    assert len(env.timing.latency_s) == 20 and env.timing.num_dropped > 0 and "20 steps, latency" in str(env.timing)
    before = robot.observe()
    wait_until(lambda: (robot.observe().obs != before.obs).any(), 20)  # gravity asks nobody
    env.close()
