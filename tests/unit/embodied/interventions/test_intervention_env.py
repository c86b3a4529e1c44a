"""Environment in which a person or a script may act in place of the policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.config import PlayedEnvConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.interventions.intervention_env import InterventionEnv
from rlhpc.embodied.interventions.sources import MARK_CODES, Intervention, Mark, Scripted, Signals
from rlhpc.embodied.robots.driver import Observation, Robot, Verdict
from rlhpc.embodied.robots.limits import CommandLimits
from rlhpc.embodied.robots.robot_env import RobotVectorEnv
from rlhpc.embodied.robots.safety import SafetyCore
from rlhpc.embodied.robots.states import State
from rlhpc.runtime.errors import ConfigError


class Line(VectorEnv):
    """Slots on a line: an action moves them; episodes end after `length` steps."""

    supports_state = True

    def __init__(self, num_envs: int = 1, length: int = 5) -> None:
        self.num_envs, self.length = num_envs, length
        self.observation_space = spaces.Box(-9, 9, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.executed: list[list[float]] = []
        self.calls: list[str] = []

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.place, self.steps = np.zeros((self.num_envs, 1), np.float32), np.zeros(self.num_envs, int)
        return self.place.copy(), {}

    def step(self, actions: np.ndarray) -> Any:
        self.executed.append(actions[:, 0].tolist())
        self.place += actions
        self.steps += 1
        done, infos = self.steps >= self.length, dict[str, Any]()
        if done.any():
            episode = {"return": self.steps.astype(float), "length": self.steps.copy(), "mask": done.copy()}
            infos = {"final_obs": self.place.copy(), "episode": episode}
            self.place[done], self.steps[done] = 0, 0
        return self.place.copy(), np.ones(self.num_envs, np.float32), np.zeros(self.num_envs, bool), done, infos

    def hold(self) -> None:
        self.calls.append("hold")

    def stop(self, reason: str) -> None:
        self.calls.append(f"stop: {reason}")

    def refresh(self) -> Any:
        return self.place + 7

    def state_dict(self) -> Any:
        return {"slots": [(self.place[i].tolist(), int(self.steps[i])) for i in range(self.num_envs)]}

    def load_state_dict(self, state: Any) -> None:
        rows = self.slots_of(state)
        self.place = np.array([place for place, _ in rows], np.float32)
        self.steps = np.array([steps for _, steps in rows])


class Plan(Intervention):
    """Leads in the steps that a plan says, with action 5, and gives the planned signals after them."""

    one_slot = True

    def __init__(self, leads: Sequence[int], signals: dict[int, Signals] | None = None) -> None:
        self.leads, self.planned, self.calls, self.closed = leads, signals or {}, 0, False

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        return np.full_like(actions, 5), np.array([self.calls in self.leads])

    def signals(self) -> Signals:
        return self.planned.get(self.calls, Signals())

    def close(self) -> None:
        self.closed = True


def build(inner: VectorEnv, source: Intervention, **section: Any) -> InterventionEnv:
    env = InterventionEnv(inner, source, PlayedEnvConfig(**section), range(inner.num_envs), seed=3)
    env.reset()
    return env


def chunk(*actions: float) -> np.ndarray:
    return np.array(actions, np.float32).reshape(1, -1, 1)


def test_a_persons_action_is_executed_within_the_action_space_and_reported() -> None:
    inner = Line()
    env = build(inner, Plan([2]))
    for expected in (0.5, 1.0, 0.5):
        *_, infos = env.chunk_step(chunk(0.5))
        assert infos["executed_actions"].ravel().tolist() == [expected]
        assert infos["intervened"].tolist() == [[expected == 1.0]]
    assert inner.executed == [[0.5], [1.0], [0.5]]
    env.chunk_step(chunk(0))
    *_, infos = env.chunk_step(chunk(0))
    assert infos["episode"]["helped"].tolist() == [True]
    for _ in range(5):
        *_, infos = env.chunk_step(chunk(0))
    assert infos["episode"]["helped"].tolist() == [False], "help counts for its own episode alone"


def test_a_chunk_ends_where_a_person_gives_back_control() -> None:
    inner = Line()
    env = build(inner, Plan([2, 3]))
    _, rewards, *_, infos = env.chunk_step(chunk(0.1, 0.2, 0.3, 0.4, 0.5))
    assert inner.executed == [[np.float32(0.1)], [1.0], [1.0]]
    assert infos["intervened"].tolist() == [[False, True, True, False, False]]
    assert infos["chunk"]["mask"].tolist() == [[True, True, True, False, False]] and rewards.tolist() == [3]
    np.testing.assert_allclose(infos["executed_actions"].ravel(), [0.1, 1, 1, 0.4, 0.5], rtol=1e-6)


def test_a_chunk_ends_with_its_episode() -> None:
    inner = Line(length=2)
    env = build(inner, Plan([]))
    _, rewards, _, truncations, infos = env.chunk_step(chunk(0.1, 0.1, 0.1))
    assert len(inner.executed) == 2 and rewards.tolist() == [2] and truncations.all()
    assert infos["final_obs"].ravel().tolist() == pytest.approx([0.2]) and infos["episode"]["mask"].all()


@pytest.mark.parametrize(("mark", "reward"), [(Mark.SUCCESS, 2.0), (Mark.FAILURE, 0.0)])
def test_a_mark_ends_the_episode(mark: Mark, reward: float) -> None:
    env = build(Line(), Plan([1], {2: Signals(mark)}), reward_scale=2.0)
    env.chunk_step(chunk(0.5))
    obs, rewards, terminations, _, infos = env.chunk_step(chunk(0.5, 0.5))
    assert terminations.tolist() == [True] and rewards.tolist() == [reward] and obs.tolist() == [[0.0]]
    assert infos["final_obs"].tolist() == [[1.5]] and infos["marks"].tolist() == [MARK_CODES[mark]] != [0]
    *_, later_infos = env.chunk_step(chunk(0.5))
    assert later_infos["marks"].tolist() == [0]
    episode = infos["episode"]
    assert episode["success_once"].tolist() == [mark is Mark.SUCCESS] and episode["helped"].tolist() == [True]
    assert episode["return"].tolist() == [0.5 + (mark is Mark.SUCCESS)] and episode["length"].tolist() == [2]


def test_a_pause_holds_the_robot_and_continues_from_a_new_observation() -> None:
    inner = Line()
    source = Plan([], {1: Signals(paused=True)})
    env = build(inner, source)
    threading.Timer(0.1, lambda: source.planned.clear()).start()
    start = time.monotonic()
    obs, *_ = env.chunk_step(chunk(0.5, 0.5))
    assert time.monotonic() - start > 0.09 and inner.calls[0] == "hold" and len(inner.executed) == 1
    assert obs.tolist() == [[7.5]]


def test_a_pause_ends_with_the_run() -> None:
    class Over(Exception):
        pass

    def end(reason: str) -> None:
        raise Over

    env = build(Line(), Plan([], {1: Signals(paused=True)}))
    env.on_wait = end
    with pytest.raises(Over):
        env.chunk_step(chunk(0.5))


@pytest.mark.parametrize("holds_hardware", [True, False])
def test_the_robot_is_stopped_once_if_the_device_of_a_leading_person_fails(
    holds_hardware: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One message says it: that of the robot, or that the policy leads in a simulator."""
    inner, source = Line(), Plan([1])
    inner.holds_hardware = holds_hardware
    env = build(inner, source)
    env.chunk_step(chunk(0))
    source.failure = "the gamepad disconnected"
    for _ in range(3):
        env.chunk_step(chunk(0))
    assert inner.calls == ["stop: the gamepad disconnected"]
    expected = [] if holds_hardware else ["the gamepad disconnected; the policy leads until it is back"]
    assert [record.message for record in caplog.records] == expected


def test_scripts_watch_several_slots_and_resume_bit_for_bit() -> None:
    def played(env: InterventionEnv, steps: int) -> list[Any]:
        results = []
        for _ in range(steps):
            obs, rewards, *_, infos = env.chunk_step(np.full((3, 2, 1), 0.25, np.float32))
            results.append([array.tolist() for array in (obs, rewards, infos["intervened"], infos["executed_actions"])])
        return results

    def new(count: int) -> InterventionEnv:
        script = Scripted(f"{__name__}:leftwards", patience=1, hold=1, max_hold=2, chance=0.3, noise=0.1)
        return build(Line(count, length=7), script)

    env = new(3)
    first = played(env, 4)
    assert any(led for _, _, mask, _ in first for row in mask for led in row)
    state = env.state_dict()
    later = played(env, 6)
    again = new(3)
    again.load_state_dict(state)
    assert played(again, 6) == later
    moved = new(3)  # as a run with another layout of slots does
    moved.load_state_dict(moved.merge_states([env.slot_state(state, i) for i in range(3)]))
    assert played(moved, 6) == later


def leftwards(obs: np.ndarray) -> np.ndarray:
    """An expert who goes to the left."""
    return np.full((len(obs), 1), -1, np.float32)


def test_a_person_watches_one_slot() -> None:
    with pytest.raises(ConfigError, match=r"one slot at a time: set env\.train\.num_envs=1 \(it is 2\)"):
        build(Line(2), Plan([]))


class Arm(Robot):
    """An arm that is where it was sent to."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)
    action_space = spaces.Box(-2, 2, (1,), np.float32)
    control_mode = "absolute"

    def __init__(self) -> None:
        self.place, self.sent, self.stops = np.zeros(1), list[float](), 0

    def reset(self, seed: int) -> None:
        self.place = np.zeros(1)

    def position(self) -> np.ndarray:
        return self.place

    def observe(self) -> Observation:
        return Observation(self.place.astype(np.float32), time.monotonic())

    def act(self, action: np.ndarray) -> None:
        self.place = np.asarray(action, float)
        self.sent.append(float(action[0]))

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        return Verdict(0.0)

    def stop(self) -> None:
        self.stops += 1


class Wild(Intervention):
    """Leads always, with the actions of a list."""

    def __init__(self, actions: Sequence[float]) -> None:
        self.actions = iter(actions)

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.full_like(actions, next(self.actions)), np.ones(1, bool)


def robot_env(arm: Arm, source: Intervention) -> tuple[InterventionEnv, SafetyCore]:
    core = SafetyCore(arm, CommandLimits(max_change=0.5, resume="auto"))
    section = PlayedEnvConfig(env_type="robot", kwargs={"hz": 200.0, "max_change": 0.5, "resume": "auto"})
    env = InterventionEnv(RobotVectorEnv(section, 1, 0, 0, core), source, section, range(1), seed=0)
    env.reset()
    return env, core


def test_a_persons_command_passes_the_safety_core() -> None:
    arm = Arm()
    env, core = robot_env(arm, Wild([9.0, 9.0, np.nan]))
    try:
        env.chunk_step(chunk(0))
        env.chunk_step(chunk(0))
        assert arm.sent == [0.5, 1.0], "max_change counts from where the arm is"
        *_, truncations, infos = env.chunk_step(chunk(0))
        assert arm.sent == [0.5, 1.0] and truncations.all() and infos["lost"].all() and core.timing.num_stopped == 1
        assert not infos["intervened"].any(), "an action that was not executed is not the person's"
    finally:
        env.close()


def test_a_robot_is_stopped_when_the_device_fails_and_its_data_are_kept() -> None:
    arm, source = Arm(), Wild([0.1, 0.1])
    env, core = robot_env(arm, source)
    try:
        *_, infos = env.chunk_step(chunk(0))
        assert infos["intervened"].all()
        source.failure = "the spacemouse disconnected"
        *_, truncations, infos = env.chunk_step(chunk(0))
        assert len(arm.sent) == 1 and core.timing.num_stopped == 1 and infos["lost"].all() and truncations.all()
        assert core.state is not State.STOPPED, "resume auto: the next episode has begun"
    finally:
        env.close()


def test_the_pace_of_a_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Plan([])
    source.hz = 50.0
    env = build(Line(length=100), source)
    start = time.monotonic()
    for _ in range(6):
        env.chunk_step(chunk(0))
    assert 0.09 < time.monotonic() - start < 0.4


def test_it_is_built_from_the_configuration() -> None:
    from rlhpc.embodied.interventions.intervention_env import with_interventions

    section = PlayedEnvConfig(env_id="Pendulum-v1")
    env = make_env(section, 2)
    assert with_interventions(env, section, range(2), 0) is env
    section.intervene.source = "scripted"
    section.intervene.kwargs = {"expert": f"{__name__}:leftwards", "hold": 0}
    with pytest.raises(ConfigError, match="hold 0"):
        with_interventions(make_env(section, 2), section, range(2), 0)
    section.intervene.kwargs = {"expert": f"{__name__}:leftwards", "patience": 1}
    env = with_interventions(make_env(section, 2), section, range(2), 0)
    env.reset()
    *_, infos = env.chunk_step(np.ones((2, 1, 1), np.float32))
    assert infos["intervened"].all() and (infos["executed_actions"] == -1).all()
    env.close()
