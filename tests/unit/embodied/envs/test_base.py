"""Interface of vector environments: chunks, checks of users' classes, merged infos, timing of robots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.envs.base import (
    TIMING_NAMES,
    Timing,
    VectorEnv,
    concat_timings,
    env_failed,
    merge_infos,
    similar_ids_hint,
    timing_row,
)
from rlhpc.embodied.envs.interface import InterfaceError


class Countdown(VectorEnv):
    """Slot i ends after i + 1 steps; its reward is the number of the step. `wrong` replaces a value of its results."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, num_envs: int = 2, **wrong: Any) -> None:
        self.num_envs, self.steps, self.wrong = num_envs, np.zeros(num_envs, int), wrong

    def _obs(self) -> np.ndarray:
        return self.steps[:, None].astype(np.float32)

    def reset(self, seed: int | None = None) -> Any:
        self.steps[:] = 0
        return self.wrong.get("reset", (self._obs(), {}))

    def step(self, actions: np.ndarray) -> Any:
        self.steps += 1
        ended = self.steps > np.arange(self.num_envs)
        infos = (
            {"final_obs": self._obs(), "episode": {"length": self.steps.copy(), "mask": ended}} if ended.any() else {}
        )
        rewards = self.steps.astype(np.float32)
        self.steps[ended] = 0
        step = {
            "obs": self._obs(),
            "rewards": rewards,
            "terminations": ended,
            "truncations": ~ended & ended,
            "infos": infos,
        }
        return tuple((step | self.wrong).values())[:5]


def test_a_chunk_stops_counting_where_an_episode_ends() -> None:
    env = Countdown()
    env.reset()
    _, rewards, terminations, truncations, infos = env.chunk_step(np.zeros((2, 3, 1)))
    assert rewards.tolist() == [1, 3] and terminations.all() and not truncations.any()
    assert infos["chunk"]["mask"].tolist() == [[True, False, False], [True, True, False]]
    assert infos["chunk"]["rewards"].tolist() == [[1, 0, 0], [1, 2, 0]]
    assert infos["episode"]["length"].tolist() == [1, 2] and infos["final_obs"].tolist() == [[1], [2]]
    assert env.chunk_step(np.zeros((2, 1, 1)))[1].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reset": np.zeros(2)}, r"reset\(\) returned an array of shape \(2,\)"),
        ({"reset": (np.zeros(2), {})}, r"as observations; the space is Box"),
        ({"rewards": [0, 0]}, "a list of 2 .* as rewards"),
        ({"terminations": np.ones(2, int)}, "as terminations"),
        ({"truncations": np.ones(3, bool)}, "as truncations"),
        ({"infos": None}, "a tuple of 5"),
        ({"terminations": np.ones(2, bool), "infos": {}}, "its infos have no final_obs"),
    ],
)
def test_a_users_class_is_told_what_it_returned(wrong: dict[str, Any], words: str) -> None:
    env = Countdown(**wrong)
    with pytest.raises(InterfaceError, match=words):
        env.reset()
        env.step(np.zeros((2, 1)))


def test_states_belong_to_a_number_of_slots() -> None:
    env = Countdown()
    assert env.slots_of(env.merge_states([1, 2])) == [1, 2] and env.slot_state({"slots": [1, 2]}, 1) == 2
    with pytest.raises(ValueError, match="state of 3 slots for 2"):
        env.slots_of({"slots": [1, 2, 3]})
    for call in (env.state_dict, lambda: env.load_state_dict({}), lambda: env.continue_episodes(np.zeros(2))):
        with pytest.raises(NotImplementedError, match="Countdown"):
            call()
    assert env.render() is env.env_states() is env.refresh() is None


def test_infos_of_later_steps_fill_in_their_rows() -> None:
    infos: dict[str, Any] = {}
    merge_infos(infos, {"a": np.array([1, 2]), "b": {"c": np.array([1, 2])}}, np.array([True, False]))
    merge_infos(infos, {"a": np.array([3, 4]), "b": {"c": np.array([3, 4])}}, np.array([False, True]))
    assert infos["a"].tolist() == infos["b"]["c"].tolist() == [1, 4]
    assert env_failed({}, 2).tolist() == [False, False] and env_failed({"lost": [0, 1]}, 2).tolist() == [False, True]


def test_a_hint_names_similar_ids() -> None:
    assert similar_ids_hint("PushCub", ["PushCube", "Ant"], "see the list") == "did you mean PushCube?"
    assert similar_ids_hint("x", ["PushCube"], "see the list") == "see the list"


def test_timing_reports_each_measurement_once() -> None:
    timing, run = Timing(), Timing()
    assert str(timing) == "no steps"
    for latency_s, is_late in ((0.010, False), (0.030, True)):
        timing.record_command(latency_s, is_late=is_late)
        timing.record_step(is_dropped=is_late)
    for record in (timing.record_hold, timing.record_refusal, timing.record_stop, timing.record_loss):
        record()
    timing.record_round_trips([0.5])
    for period_s in (0.1, 0.109, 0.091, 0.112):
        timing.record_period(period_s, 0.1)
    news = timing.pop_measurements()
    run.add(news)
    assert (
        str(run)
        == str(timing)
        == ("2 steps, latency 20.0 ms (99 %: 29.8 ms), 1 late, 1 dropped, 1 held, 1 refused, 1 stopped, 1 missed")
    )
    assert run.num_lost == 1 and run.link_s == [0.5] and run.period_s == pytest.approx([0.1, 0.109, 0.091, 0.112])
    assert news["robot_latency_ms"].tolist() == [10, 30] and timing.pop_measurements()["robot_latency_ms"].size == 0
    timing.record_hold()
    columns = concat_timings([timing, None])
    assert (
        columns.keys() == set(TIMING_NAMES)
        and columns["robot_held"].tolist() == [1]
        and columns["robot_late"].tolist() == [0]
    )
    row = timing_row(news)
    assert row["env/robot_latency_ms_max"] == 30 and row["env/robot_lost"] == 1 and timing_row(concat_timings([])) == {}
