"""MetaWorld's suites, of the library itself: which tasks are played, what is shown of them, and what a resume goes on with."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.metaworld import _INSTRUCTIONS
from rlhpc.embodied.envs.observations import decode_text
from rlhpc.embodied.evaluation.episodes import evaluate_policy
from rlhpc.runtime.errors import ConfigError
from tests.extras import find_python, needs_python

PYTHON, LEROBOT = find_python("metaworld"), find_python("lerobot")
pytestmark = needs_python("metaworld")


def section(env_id: str, **changes: Any) -> Any:
    values: dict[str, Any] = {"env_type": "metaworld", "env_id": env_id, "simulator_python": PYTHON, "simulators": 1}
    values |= {"num_envs": 2, "max_episode_steps": 3, "ignore_terminations": False, "wrappers": [], "kwargs": {}}
    return OmegaConf.structured(EvalEnvConfig(**(values | changes)))


def build(env_id: str, num_envs: int = 2, stage: str = "train", **changes: Any) -> Any:
    return make_env(section(env_id, num_envs=num_envs, **changes), num_envs, seed=3, stage=stage)


@pytest.mark.parametrize(
    ("suite", "count", "some"),
    [
        ("metaworld_50", 50, {"assembly-v3", "window-close-v3"}),
        ("mt50", 50, {"assembly-v3", "window-close-v3"}),
        ("metaworld_45_ind", 45, {"reach-v3"}),
        ("metaworld_45_ood", 5, {"bin-picking-v3", "box-close-v3", "hand-insert-v3", "door-lock-v3", "door-unlock-v3"}),
        ("mt10", 10, {"reach-v3", "window-close-v3"}),
    ],
)
def test_the_tasks_of_a_suite(suite: str, count: int, some: set[str]) -> None:
    env = build(suite, 1)
    env.close()
    assert len(env.task_names) == count and some <= set(env.task_names) <= set(_INSTRUCTIONS)
    assert env.observation_space.shape == (39 + count,)


@needs_python("lerobot")
def test_instructions_are_those_that_policies_were_trained_on() -> None:
    where = "import importlib.util; print(importlib.util.find_spec('lerobot').submodule_search_locations[0])"
    done = subprocess.run([LEROBOT, "-c", where], capture_output=True, text=True, check=True, timeout=60)
    config = json.loads((Path(done.stdout.strip()) / "envs/metaworld_config.json").read_text())
    assert config["TASK_DESCRIPTIONS"] == _INSTRUCTIONS


def test_an_evaluation_plays_the_tasks_in_turn_and_tells_them_apart() -> None:
    class Still:
        def predict_action_batch(self, obs: Any, mode: str) -> Any:
            import torch

            return torch.zeros(len(obs), 1, 4), {}

        def state_dict(self) -> dict[str, Any]:
            return {}

    result = evaluate_policy(Still(), section("metaworld_45_ood", num_envs=3), seed=5, episodes=10)
    assert result["tasks"].keys() == set(build("metaworld_45_ood", 1).task_names)
    assert {row["episodes"] for row in result["tasks"].values()} == {2}
    assert np.mean([row["return_mean"] for row in result["tasks"].values()]) == pytest.approx(result["return_mean"])


def test_training_draws_tasks_and_groups_share_them() -> None:
    env = build("mt10", 4, group_size=2)
    try:
        drawn = Counter[int]()
        for _ in range(5):
            obs, _ = env.reset()
            np.testing.assert_array_equal(obs[::2], obs[1::2])
            drawn.update(obs[:, 39:].argmax(1).tolist())
            assert (obs[:, 39:].sum(1) == 1).all()
    finally:
        env.close()
    assert len(drawn) > 2


def test_a_policy_may_be_kept_from_knowing_the_task() -> None:
    env = build("mt10", 1, kwargs={"task_one_hot": False})
    env.close()
    assert env.observation_space.shape == (39,)


def test_pictures_show_each_slot_its_task() -> None:
    """Each slot's pictures are those of an environment that has no other slots, also after tasks have changed."""
    kwargs = {"obs_mode": "rgb", "width": 48, "height": 40, "camera_position": [0.75, 0.075, 0.7]}
    together = build("metaworld_45_ood", 2, "eval", kwargs=kwargs)
    texts = list[str]()
    try:
        obs, _ = together.reset()
        assert obs["rgb"].shape == (2, 40, 48, 3) and obs["state"].shape == (2, 4)
        shown = [obs]
        for _ in range(7):  # the third episodes begin
            shown.append(together.step(np.full((2, 4), 0.5, np.float32))[0])
        texts = [decode_text(text) for obs in shown for text in obs["instruction"]]
    finally:
        together.close()
    for slot in range(2):
        side = section("metaworld_45_ood", num_envs=2, kwargs=kwargs)
        alone = make_env(side, 1, slot_offset=slot, seed=3, stage="eval")
        try:
            obs, _ = alone.reset()
            for step in range(8):
                for key in obs:
                    np.testing.assert_array_equal(obs[key][0], shown[step][key][slot], err_msg=f"{key} of step {step}")
                obs = alone.step(np.full((1, 4), 0.5, np.float32))[0]
        finally:
            alone.close()
    assert set(texts) == {_INSTRUCTIONS[task] for task in together.task_names}


def test_the_first_picture_shows_objects_where_they_are() -> None:
    """A repeated episode begins with the same picture, whatever was simulated before."""
    kwargs = {"obs_mode": "rgb", "width": 48, "height": 48}
    env = build("window-open-v3", 1, kwargs=kwargs, use_fixed_reset_state_ids=True)
    try:
        first = env.reset()[0]["rgb"]
        np.testing.assert_array_equal(env.reset()[0]["rgb"], first)
    finally:
        env.close()


def test_a_resumed_run_goes_on_with_its_task() -> None:
    whole = build("mt10", 2)
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 2, 4)).astype(np.float32)
    resumed = build("mt10", 2)
    try:
        whole.reset()
        for action in actions[:4]:
            whole.step(action)
        resumed.load_state_dict(whole.state_dict())
        for action in actions[4:]:
            for x, y in zip(whole.step(action)[:4], resumed.step(action)[:4], strict=True):
                np.testing.assert_array_equal(x, y)
    finally:
        whole.close()
        resumed.close()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("metaworld_55", {}, r"'metaworld_55', which MetaWorld does not know; did you mean metaworld_50"),
        ("MT10", {}, "did you mean mt10"),
        ("lift", {}, r"the suites are mt10, mt50, metaworld_50, metaworld_45_ind, metaworld_45_ood"),
        ("reach-v3", {"obs_mode": "pixels"}, r"obs_mode is 'pixels'; allowed: state, rgb"),
        ("reach-v3", {"camera_position": [0.75, 0.7]}, r"camera_position is \[0.75, 0.7\]; allowed: three numbers"),
    ],
)
def test_mistakes(env_id: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(env_id, kwargs=kwargs)
