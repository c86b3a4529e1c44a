"""The environment, by its rules: pytest test_my_env.py"""

import gymnasium
import my_env  # registers Reach-v0
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env


def test_the_interface_is_gymnasiums() -> None:
    """Among other things: observations are in their space, and a seed decides the episode."""
    check_env(my_env.Reach(render_mode="rgb_array"))


def test_the_way_to_the_goal_ends_in_success() -> None:
    env = gymnasium.make("Reach-v0")
    observation, _ = env.reset(seed=1)
    for _ in range(15):
        observation, reward, terminated, truncated, info = env.step(np.clip(observation[2:] - observation[:2], -1, 1))
        if terminated:
            break
    assert terminated and not truncated and info["success"] and reward == pytest.approx(-0.1, abs=0.1)


def test_standing_still_ends_at_the_time_limit() -> None:
    env = gymnasium.make("Reach-v0")
    env.reset(seed=1)
    steps = 1
    while not (end := env.step(np.zeros(2, np.float32)))[3]:
        steps += 1
    assert steps == 40 and not end[2] and not end[4]["success"]


def test_the_picture_shows_point_and_goal() -> None:
    env = my_env.Reach(render_mode="rgb_array")
    env.reset(seed=1)
    picture = env.render()
    colors = {tuple(map(int, pixel)) for pixel in picture.reshape(-1, 3)}
    assert picture.dtype == np.uint8 and {(0, 160, 0), (0, 0, 200), (255, 255, 255)} == colors
