"""Slots: a group's later resets, chunks, action numbers, wrappers, and state that moves between layouts."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import DictConfig, OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import VectorEnv, make_env, register_env, space_from_json, space_to_json
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra


def section(env_id: str = "CartPole-v1", **changes: Any) -> DictConfig:
    return OmegaConf.structured(EnvSideConfig(env_id=env_id, **changes))


class Clock(gymnasium.Env):
    """Counts its steps, ends when told to, and remembers its last action."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)

    def __init__(self, kind: str = "discrete") -> None:
        self.action_space = {
            "discrete": spaces.Discrete(3, start=5),
            "multi": spaces.MultiDiscrete([3, 2], start=[10, 20]),
            "box": spaces.Box(np.float32([-1, -2]), np.float32([1, 2])),
        }[kind]
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return np.float32([self.episode, 0]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if isinstance(self.action_space, spaces.Discrete):
            assert self.action_space.contains(action)
        self.count += 1
        self.last = np.array(action)
        ended = isinstance(self.action_space, spaces.Discrete) and action == 7
        return (
            np.float32([self.episode, self.count]),
            10.0 * self.episode + self.count,
            ended,
            False,
            {"success": ended},
        )


for kind in ("discrete", "multi", "box"):
    gymnasium.register(f"test/Clock-{kind}-v0", entry_point=lambda kind=kind: Clock(kind))


def test_every_reset_is_shared_by_a_group() -> None:
    env = make_env(section(group_size=4, max_episode_steps=3), 8, seed=1)
    obs, _ = env.reset()
    for step in range(9):
        first = [obs[i].tobytes() for i in range(8)]
        if step % 3 == 0:
            assert len(set(first[:4])) == len(set(first[4:])) == 1 and first[0] != first[4]
        obs = env.step(np.arange(8) % 2)[0]


def test_a_reset_with_a_seed_starts_anew() -> None:
    env = make_env(section(), 2, seed=1)
    first = env.reset()[0]
    second = env.reset()[0]
    assert (first != second).any()
    np.testing.assert_array_equal(env.reset(seed=1)[0], first)
    np.testing.assert_array_equal(make_env(section(), 2, seed=9).reset(seed=1)[0], first)


def test_slots_differ_and_seeds_differ() -> None:
    obs = make_env(section(), 16, seed=0).reset()[0]
    assert len({row.tobytes() for row in obs}) == 16
    assert (make_env(section(), 16, seed=1).reset()[0] != obs).any(1).all()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Acrobot-v1"])
def test_several_slots_are_plain_gymnasium_loops(env_id: str) -> None:
    env = make_env(section(env_id, max_episode_steps=30), 3, slot_offset=2, seed=4)
    obs, _ = env.reset()
    plain = [gymnasium.make(env_id, max_episode_steps=30) for _ in range(3)]
    seeds = [int(np.random.SeedSequence([4, 2 + i]).generate_state(1)[0]) for i in range(3)]
    expected = [one.reset(seed=seed)[0] for one, seed in zip(plain, seeds, strict=True)]
    rng = np.random.default_rng(0)
    for _ in range(100):
        np.testing.assert_array_equal(obs, np.float32(expected))
        discrete = env_id == "Acrobot-v1"
        actions: Any = rng.integers(0, 3, 3) if discrete else rng.uniform(-5, 5, (3, 1)).astype(np.float32)
        obs, rewards, terminations, truncations, infos = env.step(actions)
        for i, one in enumerate(plain):
            action = int(actions[i]) if discrete else np.clip(actions[i], -2, 2)
            expected[i], reward, terminated, truncated, _ = one.step(action)
            assert rewards[i] == np.float32(reward)
            assert (terminations[i], truncations[i]) == (terminated, truncated and not terminated)
            if terminated or truncated:
                np.testing.assert_array_equal(infos["final_obs"][i], np.float32(expected[i]))
                expected[i] = one.reset()[0]


class TestChunks:
    """Several actions at once."""

    def test_a_slot_that_ended_waits_at_its_next_episode(self) -> None:
        env = make_env(section("test/Clock-discrete-v0"), 3)
        env.reset()
        actions = np.zeros((3, 4, 1), np.int64)
        actions[1, 1], actions[2, 3] = 2, 2  # counted from 0; the clock's 7
        obs, rewards, terminations, truncations, infos = env.chunk_step(actions)
        assert obs.tolist() == [[1, 4], [2, 0], [2, 0]]
        assert rewards.tolist() == [11 + 12 + 13 + 14, 11 + 12, 11 + 12 + 13 + 14]
        assert terminations.tolist() == [False, True, True] and not truncations.any()
        episode = infos["episode"]
        assert episode["mask"].tolist() == [False, True, True] and episode["length"].tolist() == [0, 2, 4]
        assert episode["return"].tolist() == [0, 23, 50] and episode["success_once"].tolist() == [0, 1, 1]
        assert infos["final_obs"].tolist() == [[0, 0], [1, 2], [1, 4]]

    def test_a_chunk_is_its_actions_one_by_one(self) -> None:
        chunked, single = (make_env(section("Pendulum-v1"), 4, seed=2) for _ in range(2))
        chunked.reset()
        single.reset()
        actions = np.random.default_rng(0).uniform(-2, 2, (4, 5, 1)).astype(np.float32)
        together = chunked.chunk_step(actions)
        apart = [single.step(actions[:, i]) for i in range(5)]
        np.testing.assert_array_equal(together[0], apart[-1][0])
        np.testing.assert_allclose(together[1], sum(step[1] for step in apart), rtol=1e-6)

    def test_everyone_ended_early(self) -> None:
        env = make_env(section("Pendulum-v1", max_episode_steps=2), 2)
        env.reset()
        _, _, _, truncations, infos = env.chunk_step(np.zeros((2, 6, 1), np.float32))
        assert truncations.all() and infos["episode"]["length"].tolist() == [2, 2]
        np.testing.assert_array_equal(env.state_dict()["slots"][0]["elapsed"], 0)


class TestActions:
    """From a policy's numbers to the environment's."""

    @pytest.mark.parametrize(
        ("kind", "given", "seen"),
        [
            ("discrete", [[0], [1]], [5, 6]),
            ("multi", [[0, 0], [2, 1]], [[10, 20], [12, 21]]),
            ("box", [[0.5, -0.5], [9.0, -9.0]], [[0.5, -0.5], [1.0, -2.0]]),
        ],
    )
    def test_what_arrives(self, kind: str, given: Any, seen: Any) -> None:
        env: Any = make_env(section(f"test/Clock-{kind}-v0"), 2)
        env.reset()
        env.chunk_step(np.array(given)[:, None])
        assert [one.unwrapped.last.tolist() for one in env.envs] == seen


class TestState:
    """A checkpoint continues as if it had not been there, on any layout."""

    def test_another_layout(self) -> None:
        whole = make_env(section(max_episode_steps=20), 4, seed=6)
        whole.reset()
        actions = np.random.default_rng(0).integers(0, 2, (90, 4))
        for row in actions[:30]:
            whole.step(row)
        state = pickle.loads(pickle.dumps(whole.state_dict()))
        halves = [make_env(section(max_episode_steps=20), 2, offset, seed=99) for offset in (0, 2)]
        for i, half in enumerate(halves):
            half.load_state_dict(half.merge_states([whole.slot_state(state, slot) for slot in (2 * i, 2 * i + 1)]))
        for row in actions[30:]:
            together = whole.step(row)
            apart = [half.step(row[2 * i : 2 * i + 2]) for i, half in enumerate(halves)]
            for k in range(4):
                np.testing.assert_array_equal(together[k], np.concatenate([part[k] for part in apart]))

    def test_saving_changes_nothing(self) -> None:
        saved, other = (make_env(section("Acrobot-v1"), 2, seed=3) for _ in range(2))
        np.testing.assert_array_equal(saved.reset()[0], other.reset()[0])
        for i in range(60):
            saved.state_dict()
            np.testing.assert_array_equal(saved.step(np.array([i % 3, 0]))[0], other.step(np.array([i % 3, 0]))[0])

    def test_of_other_slots(self) -> None:
        env = make_env(section(), 2)
        env.reset()
        with pytest.raises(ValueError, match="state of 2 slots for 3"):
            make_env(section(), 3).load_state_dict(env.state_dict())


class TestNames:
    """What can be named in a configuration."""

    def test_wrappers(self) -> None:
        env = make_env(section("test/Clock-discrete-v0", wrappers=["gymnasium.wrappers:FlattenObservation"]), 1)
        assert env.observation_space.shape == (2,)
        for path in ("gymnasium.wrappers:Flaten", ":x", ".y:x"):
            with pytest.raises(ConfigError, match=r"env\.wrappers\[0\] is .*cannot be imported"):
                make_env(section(wrappers=[path]), 1)

    def test_wrappers_by_name(self) -> None:
        wrappers = [
            "statistics",
            {"frame_stack": {"stack_size": 3}},
            {"gymnasium.wrappers:ReshapeObservation": {"shape": [2, 6]}},
        ]
        assert make_env(section(wrappers=wrappers), 1).observation_space.shape == (2, 6)
        for given, says in (
            ("flaten", r"\[0\] is 'flaten', which is unknown; did you mean 'flatten'"),
            (
                {"frame_stack": {"stack": 3}},
                r"\[0\] is 'frame_stack', which refuses {'stack': 3}: .*unexpected keyword",
            ),
            ({"frame_stack": 3}, r"\[0\] is {'frame_stack': 3}; allowed: a name"),
            ({"flatten": {}, "time": {}}, r"\[0\] is .*; allowed: a name"),
        ):
            with pytest.raises(ConfigError, match=r"env\.wrappers" + says):
                make_env(section(wrappers=[given]), 1)

    def test_a_wrapper_that_the_environment_does_not_suit(self) -> None:
        need_extra("embodied")
        with pytest.raises(ConfigError, match=r"'atari', which refuses the environment: Disable frame-skipping"):
            make_env(section(wrappers=["atari"]), 1)

    def test_a_wrapper_without_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cv2", None)
        with pytest.raises(ConfigError, match=r"\[0\] is 'atari', which needs a package .*opencv.*rlhpc\[embodied\]"):
            make_env(section(wrappers=["atari"]), 1)

    def test_a_third_partys_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "their_envs.py").write_text(
            "import gymnasium\nfrom rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv\n"
            "class Vector(GymnasiumVectorEnv):\n    pass\n"
            "gymnasium.register('Theirs-v0', entry_point='gymnasium.envs.classic_control:PendulumEnv')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert make_env(section("their_envs:Theirs-v0"), 2).reset()[0].shape == (2, 3)
        assert type(make_env(section("Theirs-v0", env_type="their_envs:Vector"), 2)).__name__ == "Vector"

    def test_registered(self) -> None:
        @register_env("Test-Slots")
        def build(cfg: Any, num_envs: int, slot_offset: int, seed: int) -> VectorEnv:
            return make_env(section(), num_envs, slot_offset, seed)

        assert make_env(section(env_type="tEST-slots"), 2).num_envs == 2
        for name in ("test-SLOTS", "Gymnasium"):
            with pytest.raises(ConfigError, match="registered twice"):
                register_env(name)(build)

    def test_kwargs(self) -> None:
        env: Any = make_env(section("Pendulum-v1", kwargs={"g": 3.0}), 1)
        assert env.envs[0].unwrapped.g == 3.0
        with pytest.raises(ConfigError, match=r"refuses kwargs .*gravitas"):
            make_env(section("Pendulum-v1", kwargs={"gravitas": 3.0}), 1)


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 2], start=[1, 5]),
        spaces.MultiDiscrete([[3, 2], [4, 5]]),
        spaces.MultiBinary(4),
        spaces.Box(-np.inf, np.inf, (), np.float32),
        spaces.Box(0, 1, (2, 3), np.float64),
        spaces.Box(np.array([[0], [1]]), np.array([[7], [9]]), dtype=np.int64),
        spaces.Dict({"state": spaces.Box(-1, 1, (2,), np.float32), "which": spaces.Discrete(3, start=1)}),
    ],
    ids=str,
)
def test_spaces_survive_json(space: spaces.Space[Any]) -> None:
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space


def test_a_space_of_an_older_export() -> None:
    assert space_from_json({"type": "MultiDiscrete", "nvec": [2, 3]}) == spaces.MultiDiscrete([2, 3])
    with pytest.raises(ConfigError, match="FlattenObservation"):
        space_to_json(spaces.Dict({"a": spaces.Text(2)}))
