"""Observations of several inputs: environments that show them, columns they travel in, and spaces that are stored."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc import ConfigError
from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import VectorEnv, make_env, space_from_json, space_to_json
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv
from rlhpc.embodied.envs.observations import (
    TEXT_BYTES,
    columns_of,
    decode_text,
    encode_text,
    is_channel_last,
    join,
    orient,
    rows_of,
    take,
    text_bytes,
    text_space,
)
from rlhpc.runtime.key_metadata import ORIENTATIONS


class Views(gymnasium.Env):
    """Counts its steps, in a picture, in a number and in words."""

    observation_space = spaces.Dict(
        {
            "rgb": spaces.Box(0, 255, (2, 3, 3), np.uint8),
            "state": spaces.Box(-np.inf, np.inf, (1,), np.float64),
            "instruction": spaces.Text(12),
        }
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def observe(self):
        return {
            "rgb": np.full((2, 3, 3), self.n, np.uint8),
            "state": np.array([self.n / 2]),
            "instruction": f"größe {self.n}",
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return self.observe(), {}

    def step(self, action):
        self.n += 1
        return self.observe(), 1.0, self.n == 3, False, {}


class Nested(Views):
    """Has what is not supported."""

    observation_space = spaces.Dict({"camera": spaces.Dict({"rgb": spaces.Box(0, 1, (2,), np.float32)})})


for name, cls in {"Views-v0": Views, "NestedViews-v0": Nested}.items():
    gymnasium.register(name, entry_point=cls)


def section(env_id):
    return OmegaConf.structured(EnvSideConfig(env_id=env_id, num_envs=2))


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_dict_environment_keeps_its_final_observation(chunk):
    env = make_env(section("Views-v0"), 2)
    obs, _ = env.reset()
    assert {key: (part.shape, str(part.dtype)) for key, part in obs.items()} == {
        "rgb": ((2, 2, 3, 3), "uint8"), "state": ((2, 1), "float32"), "instruction": ((2, 12), "uint8")
    }  # fmt: skip
    for _ in range(3 if chunk == 1 else 2):
        before, (obs, _, terminations, _, infos) = obs, env.chunk_step(np.zeros((2, chunk, 1), np.float32))
    assert terminations.all() and (before["state"] == 1).all()
    assert (infos["final_obs"]["state"] == 1.5).all() and (infos["final_obs"]["rgb"] == 3).all()
    assert (obs["state"] == 0).all() and decode_text(obs["instruction"][1]) == "größe 0"
    assert set(obs) == set(env.observation_space.spaces) == set(space_from_json(space_to_json(env.observation_space)))
    assert space_from_json(space_to_json(env.observation_space)) == env.observation_space


def test_nested_observations_are_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="FlattenObservation"):
        make_env(section("NestedViews-v0"), 1)


def test_columns_and_rows():
    several = {"state": np.arange(6.0).reshape(3, 2), "rgb": np.zeros((3, 4), np.uint8)}
    for obs in (several, several["state"]):
        columns = columns_of("obs", obs)
        assert all(column.split(".")[0] == "obs" for column in columns)
        back = rows_of({**columns, "observed": 1, "actions": 2}, "obs")
        halves = join([take(back, slice(0, 1)), take(back, np.array([1, 2]))])
        np.testing.assert_equal(halves, obs)


def test_texts_are_padded_and_never_cut():
    assert decode_text(encode_text("grün", 5)) == "grün" == decode_text(encode_text("grün", 9))
    assert encode_text("a", 4).tolist() == [97, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"the text 'grün' has 5 bytes, and the observation has room for 4"):
        encode_text("grün", 4)


@pytest.mark.parametrize("characters", [None, "ab", "aé", "ab漢", "😀a"])
def test_every_text_of_a_space_fits(characters):
    space = spaces.Text(7) if characters is None else spaces.Text(7, charset=characters)
    longest = max(space.character_set, key=lambda character: len(character.encode())) * 7
    assert space.contains(longest)
    (size,) = text_space(space).shape
    assert decode_text(encode_text(longest, size)) == longest
    if characters in (None, "ab"):
        assert size == 7, "one byte a character"


def test_the_longest_text_of_many_fits():
    assert text_bytes([]) == text_bytes(["a"]) == TEXT_BYTES
    assert text_bytes(["a", "ü" * TEXT_BYTES]) == 2 * TEXT_BYTES


@pytest.mark.parametrize(
    ("shape", "last"),
    [
        ((84, 84, 1), True),
        ((84, 84, 4), True),
        ((4, 84, 84), False),
        ((3, 60, 80), False),
        ((60, 80, 3), True),
        ((8, 8, 8), True),
    ],
)
def test_the_axis_of_the_channels(shape, last):
    assert is_channel_last(shape) is last


@pytest.mark.parametrize("chunk_step", [VectorEnv.chunk_step, GymnasiumVectorEnv.chunk_step], ids=["any", "gymnasium"])
def test_a_chunk_says_what_each_action_brought(chunk_step):
    env = make_env(section("Views-v0"), 2)
    env.reset()
    env.step(np.zeros((2, 1), np.float32))
    _, rewards, terminations, _, infos = chunk_step(env, np.zeros((2, 4, 1), np.float32))
    assert terminations.all() and rewards.tolist() == [2, 2]
    assert infos["chunk"]["rewards"].tolist() == [[1, 1, 0, 0]] * 2
    assert infos["chunk"]["mask"].tolist() == [[True, True, False, False]] * 2


def test_every_orientation_of_pictures_is_known() -> None:
    picture = np.arange(12).reshape(2, 2, 3)
    corners = {name: orient(picture, name)[0, 0].tolist() for name in ORIENTATIONS}
    assert corners == {"rotate_180": [9, 10, 11], "flip_rows": [6, 7, 8], "raw": [0, 1, 2]}
