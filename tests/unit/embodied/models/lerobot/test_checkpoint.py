"""LeRobot's folders as the driver sees them, which has no LeRobot: what does not fit is said before anything starts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlhpc.embodied import python_env
from rlhpc.embodied.config import EmbodiedActorConfig, ModelConfig
from rlhpc.embodied.data.demonstrations import chunk_steps, fitted_obs, window_length, window_steps
from rlhpc.embodied.models import check_policy
from rlhpc.embodied.models.lerobot.checkpoint import describe
from rlhpc.embodied.models.lerobot.policies import LerobotPolicy
from rlhpc.runtime.errors import ConfigError

PICTURES, NUMBERS = spaces.Box(0, 255, (8, 8, 6), np.uint8), spaces.Box(-1, 1, (3,), np.float32)
SPACE, ACTION = spaces.Dict({"rgb": PICTURES, "state": NUMBERS}), spaces.Box(-1, 1, (2,), np.float32)
CONFIG: dict[str, Any] = {
    "type": "act", "chunk_size": 8, "n_obs_steps": 1,
    "input_features": {
        "observation.images.top": {"type": "VISUAL", "shape": [3, 8, 8]},
        "observation.state": {"type": "STATE", "shape": [3]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
}  # fmt: skip
#: Which of the two pictures in `rgb` the folder's camera is.
SECOND = {"cameras": {"top": "rgb_1"}}


def section(folder: Path, config: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return ModelConfig(model_type="lerobot", model_path=str(folder), **changes)


def test_inputs_are_parts_of_the_observation(tmp_path: Path) -> None:
    found = describe(section(tmp_path, CONFIG, num_action_chunks=8, kwargs=SECOND), SPACE, ACTION)
    assert found.cameras == {"observation.images.top": ("rgb", 1)}
    assert (found.family, found.sources) == ("act", {"observation.images.top": None, "observation.state": "state"})
    place = {"observation.environment_state": {"type": "ENV", "shape": [3]}}
    alone = section(tmp_path, {**CONFIG, "input_features": place})
    assert describe(alone, NUMBERS, ACTION).sources == {"observation.environment_state": ""}


SEES_TWO = {"type": "diffusion", "n_obs_steps": 2, "horizon": 8}


def test_several_observations_have_an_axis_of_time(tmp_path: Path) -> None:
    stacked = spaces.Dict(
        {"rgb": spaces.Box(0, 255, (2, 8, 8, 6), np.uint8), "state": spaces.Box(-1, 1, (2, 3), np.float32)}
    )
    found = describe(section(tmp_path, {**CONFIG, **SEES_TWO}, num_action_chunks=7, kwargs=SECOND), stacked, ACTION)
    assert found.num_obs_steps == 2 and found.sources == {"observation.images.top": None, "observation.state": "state"}
    with pytest.raises(ConfigError, match=r"num_action_chunks is 8; .* has horizon 8, 1 of which .*n_obs_steps 2"):
        describe(section(tmp_path, {**CONFIG, **SEES_TWO}, num_action_chunks=8), stacked, ACTION)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "family": ({"type": "tdmpc"}, {}, "of type 'tdmpc'; here are: act, diffusion, smolvla, pi0, pi05"),
    "groot": ({"type": "groot"}, {}, r"of type 'groot'; GR00T N1\.7 came with LeRobot 0\.6, .* N1\.5 alone"),
    "chunk": ({}, {"num_action_chunks": 9}, "num_action_chunks is 9; .* has chunk_size 8"),
    "option": (
        {},
        {"kwargs": {"noise_level": 1}},
        r"noise_level is 1; lerobot.s act has no such option; allowed: statistics",
    ),
    "history": ({"n_obs_steps": 2}, {}, "n_obs_steps 2; act sees one"),
    "one of two": (SEES_TWO, {}, r"n_obs_steps 2; the environment shows rgb .*frame_stack: {stack_size: 2}"),
    "ensemble": ({"temporal_ensemble_coeff": 0.01}, {}, "set it null"),
    "actions": ({"output_features": {"action": {"shape": [7]}}}, {}, r"actions of shape \[7\], the environment \[2\]"),
    "state": (
        {"input_features": {"observation.state": {"type": "STATE", "shape": [4]}}},
        {},
        r"observation.state of shape \[4\]; the environment shows rgb \[8, 8, 6\], state \[3\]",
    ),
    "cameras": (
        {"input_features": {f"observation.images.{i}": {"type": "VISUAL", "shape": [3, 8, 8]} for i in range(3)}},
        {},
        "has 3 cameras, the environment shows 2",
    ),
}


def damaged(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields copies of config.json that lack one entry, or have a value of another kind there, with the entry's path."""
    for name, value in tree.items():
        place = ".".join((*path, name))
        yield place, {key: each for key, each in tree.items() if key != name}
        for wrong in (None, "text", -1, 0, 1.5, [], [None], {}, {"shape": "3"}, True):
            yield place, {**tree, name: wrong}
        if isinstance(value, dict):
            yield from ((at, {**tree, name: each}) for at, each in damaged(value, (*path, name)))


def test_a_damaged_folder_is_refused_by_a_message(tmp_path: Path) -> None:
    for place, config in damaged(CONFIG):
        try:
            describe(section(tmp_path, config, kwargs=SECOND), SPACE, ACTION)
        except ConfigError as error:
            assert "config.json" in str(error) or "cameras" in str(error), (place, config)
            continue
        assert not place.startswith(("chunk_size", "output_features", "type")) or place.endswith("action.type"), config


def cameras_of(folder: Path, theirs: list[str], ours: dict[str, int], **kwargs: Any) -> dict[str, tuple[str, int]]:
    """Cameras of an environment with parts of so many pictures, for a folder that has `theirs` in this order."""
    inputs = {f"observation.{name}": {"type": "VISUAL", "shape": [3, 8, 8]} for name in theirs}
    parts = {key: spaces.Box(0, 255, (8, 8, 3 * count), np.uint8) for key, count in ours.items()}
    space = spaces.Dict({**parts, "state": NUMBERS})
    found = describe(section(folder, {**CONFIG, "input_features": inputs}, kwargs=kwargs), space, ACTION)
    return {name.removeprefix("observation."): camera for name, camera in found.cameras.items()}


@pytest.mark.parametrize("order", list(itertools.permutations(["images.wrist", "images.front", "images.top"])))
def test_cameras_are_matched_by_name_in_whatever_order(order: tuple[str, ...], tmp_path: Path) -> None:
    ours = {"front": 1, "top": 1, "wrist": 1}
    wanted = {f"images.{name}": (name, 0) for name in ours}
    assert cameras_of(tmp_path, list(order), ours) == wanted


def test_cameras_of_other_names(tmp_path: Path) -> None:
    assert cameras_of(tmp_path, ["image"], {"rgb": 1}) == {"image": ("rgb", 0)}
    assert cameras_of(tmp_path, ["images.b", "images.a"], {"rgb": 2}) == {
        "images.b": ("rgb", 0),
        "images.a": ("rgb", 1),
    }
    assert cameras_of(tmp_path, ["images.rgb_1", "images.rgb_0"], {"rgb": 2}) == {
        "images.rgb_1": ("rgb", 1), "images.rgb_0": ("rgb", 0)}  # fmt: skip
    chosen = {"observation.images.a": "wrist", "b": "front"}
    assert cameras_of(tmp_path, ["images.a", "images.b"], {"front": 1, "wrist": 1, "top": 1}, cameras=chosen) == {
        "images.a": ("wrist", 0), "images.b": ("front", 0)}  # fmt: skip
    for theirs, ours in ((["images.a", "images.b"], {"front": 1, "wrist": 1}), (["images.front"], {"front": 1, "wrist": 1}),
                         (["images.front", "images.b"], {"front": 1, "wrist": 1}), (["image"], {"rgb": 2})):  # fmt: skip
        with pytest.raises(
            ConfigError, match=r"which is which does not follow .* set actor\.model\.kwargs\.cameras=\{"
        ):
            cameras_of(tmp_path, theirs, ours)
    for wrong in ({"a": "front"}, {"a": "front", "b": "side"}, {"a": "front", "b": "wrist", "c": "wrist"}):
        with pytest.raises(ConfigError, match=r"kwargs\.cameras is .* has cameras a, b, the environment front, wrist"):
            cameras_of(tmp_path, ["images.a", "images.b"], {"front": 1, "wrist": 1}, cameras=wrong)
    with pytest.raises(ConfigError, match=r"cameras is 'front'; it must be a mapping"):
        cameras_of(tmp_path, ["images.a"], {"front": 1}, cameras="front")


def test_each_input_is_shown_its_camera(tmp_path: Path) -> None:
    parts = {
        "front": torch.full((1, 8, 8, 3), 255, dtype=torch.uint8),
        "rgb": torch.zeros((1, 8, 8, 6), dtype=torch.uint8),
    }
    parts["rgb"][..., 3:] = 51
    policy: Any = type("Shown", (), {"description": type("D", (), {"cameras": {"a": ("rgb", 1), "b": ("front", 0)}})})
    shown = {name: LerobotPolicy._prepare_camera_images(policy, name, parts) for name in ("a", "b")}
    assert {name: round(float(each.mean()), 3) for name, each in shown.items()} == {"a": 0.2, "b": 1.0}
    assert shown["a"].shape == (1, 3, 8, 8)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    there, here, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said):
        describe(section(tmp_path, {**CONFIG, **there}, **here), SPACE, ACTION)


def test_without_lerobot_the_make_target_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(python_env.PYTHON, raising=False)
    actor = EmbodiedActorConfig(model=section(tmp_path, CONFIG, kwargs=SECOND))
    with pytest.raises(ConfigError, match=r"needs lerobot.*make setup-lerobot"):
        check_policy(actor, (SPACE, ACTION), ["/its/python", None])
    assert check_policy(actor, (SPACE, ACTION), ["/its/python", "/its/python"]) is None
    (tmp_path / "model.json").write_text(json.dumps({"model": {"model_type": "lerobot"}}))
    with pytest.raises(ConfigError, match="make setup-lerobot"):
        python_env.call_where_importable(tmp_path, str.upper, "here")
    (tmp_path / "model.json").write_text(json.dumps({"model": {"model_type": "mlp"}}))
    assert python_env.call_where_importable(tmp_path, str.upper, "here") == "HERE"


def test_actions_beyond_the_end_are_marked() -> None:
    steps, beyond = chunk_steps(np.arange(3), np.full(3, 3), range(3))
    assert steps.tolist() == [[0, 1, 2], [1, 2, 2], [2, 2, 2]]
    assert beyond.tolist() == [[False, False, False], [False, False, True], [False, True, True]]


def test_what_is_outside_of_an_episode_is_marked_before_it_too() -> None:
    steps, outside = chunk_steps(np.arange(3), np.full(3, 3), range(-1, 2))
    assert steps.tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 2]]
    assert outside.tolist() == [[True, False, False], [False, False, False], [False, False, True]]


def test_single_observations_become_windows_where_the_environment_stacks_them() -> None:
    seen = np.arange(3, dtype=np.float32)[:, None]
    stacked, single = spaces.Box(-1, 1, (2, 1), np.float32), spaces.Box(-1, 1, (1,), np.float32)
    assert window_length("state", seen.shape, {"state": stacked}) == 2
    assert window_steps(np.arange(3), 2).tolist() == [[0, 0], [0, 1], [1, 2]]
    assert window_length("more", seen.shape, {"state": stacked}) == window_length("", seen.shape, {"": single}) == 0
    assert window_length("", (3, 2, 1), {"": stacked}) == 0, "stacked already"
    assert window_steps(np.arange(3), 0).tolist() == [0, 1, 2]
    assert fitted_obs({"state": seen, "more": seen}, spaces.Dict({"state": stacked})) == {"state": seen}
    assert fitted_obs(seen, single) == {"": seen}
