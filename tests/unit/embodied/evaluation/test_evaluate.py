"""Offline evaluation of a checkpoint: its configuration, its result, its video, and recordings of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.embodied.data.trajectories import read_trajectories
from rlhpc.embodied.evaluation.evaluate import (
    MAX_FRAMES,
    ExpertPolicy,
    VideoRecorder,
    evaluate_checkpoint,
    load_actor,
    record_episodes,
    write_result,
)
from rlhpc.runtime.errors import CheckpointError, ConfigError
from tests.extras import need_extra
from tests.unit.embodied.evaluation.saved_policies import load, save_policy


def right(obs: np.ndarray) -> np.ndarray:
    """Pushes the cart to the right."""
    return np.ones((len(obs), 1), np.int64)


RIGHT = f"{__name__}:right"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("evaluate") / "pole")


def test_a_checkpoint_is_evaluated_by_its_own_configuration(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "result.json"
    result = evaluate_checkpoint(checkpoint, output=output, suite="short")
    assert (result["suite"], result["global_step"], result["checkpoint"]) == ("short", 3, str(checkpoint))
    assert result["episodes"] == 4 and result["length_mean"] == 7 and "video" not in result
    assert json.loads(output.read_text()) == result
    assert evaluate_checkpoint(checkpoint, suite="short") == result, "actions and seeds are fixed"


def test_another_configuration_replaces_it(checkpoint: Path) -> None:
    result = evaluate_checkpoint(checkpoint, cfg=load("env.eval.max_episode_steps=5", "env.eval.seed=9"), episodes=2)
    assert (result["episodes"], result["length_mean"], result["seed"]) == (2, 5, 9)


def test_the_video_lies_beside_the_result(checkpoint: Path, tmp_path: Path) -> None:
    need_extra("embodied")
    import av

    cfg = load("env.eval.video_episodes=2")
    result = evaluate_checkpoint(checkpoint, cfg=cfg, output=tmp_path / "result.json")
    assert result["video"] == "result.mp4"
    with av.open(str(tmp_path / "result.mp4")) as video:
        assert sum(1 for _ in video.decode(video=0)) == 7 + 10, "a picture a step, and half a second of the end"
    assert "video" not in evaluate_checkpoint(checkpoint, cfg=cfg), "without a result there is no place for a video"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": b""}, "config.yaml: missing; pass the run's configuration"),
        ({"config": b"a: ["}, "config.yaml: cannot be read as YAML"),
        ({"config": b"env: 3"}, "no configuration of a policy in an environment"),
        ({"config": b"env: {train: {env_id: x}}"}, "config.yaml: no env.eval; pass a configuration"),
        ({"model": b"no weights"}, "model.safetensors"),
    ],
)
def test_faults_of_a_checkpoint_are_named(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        evaluate_checkpoint(save_policy(tmp_path / "pole", **files))


def test_an_incomplete_checkpoint_is_not_evaluated(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "pole")
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model.safetensors.*or evaluate another checkpoint"):
        evaluate_checkpoint(folder)


def test_an_environment_that_does_not_fit_is_named(checkpoint: Path, tmp_path: Path) -> None:
    cfg = load("env.eval.env_id=Acrobot-v1")
    with pytest.raises(ConfigError, match=r"env.eval.env_id=Acrobot-v1 does not fit .*global_step_3's policy"):
        evaluate_checkpoint(checkpoint, cfg=cfg)
    with pytest.raises(ConfigError, match=r"env.eval.env_id=Acrobot-v1 does not fit the policy of"):
        record_episodes(str(checkpoint), cfg, tmp_path / "episodes.h5", episodes=1)


def test_code_that_a_checkpoint_names_is_not_imported_unasked(tmp_path: Path) -> None:
    config = Path(save_policy(tmp_path / "pole") / "config.yaml").read_text()
    changed = config.replace("env_type: gymnasium", "env_type: no_such_module:Env")
    folder = save_policy(tmp_path / "named", config=changed.encode())
    with pytest.raises(ConfigError, match=r"trust") as caught:
        evaluate_checkpoint(folder)
    assert "no_such_module:Env" in str(caught.value)
    with pytest.raises(ConfigError, match=r"no_such_module:Env.*, which cannot be imported"):
        evaluate_checkpoint(folder, trust_code=True)


def test_an_expert_and_a_teacher_are_recorded(checkpoint: Path, tmp_path: Path) -> None:
    cfg = load()
    summary = record_episodes(RIGHT, cfg, tmp_path / "expert.h5", episodes=3)
    assert summary["played"] == 3
    episodes = list(read_trajectories(tmp_path / "expert.h5"))
    assert len(episodes) == 3 and all((episode["actions"] == 1).all() for episode in episodes)
    about = json.loads((tmp_path / "expert.json").read_text())
    assert about["source_type"] == "scripted" and about["source_desc"] == RIGHT

    record_episodes(str(checkpoint), cfg, tmp_path / "labelled.h5", episodes=2, teacher=RIGHT, seed=5)
    labelled = list(read_trajectories(tmp_path / "labelled.h5"))
    assert all((episode["actions"] == 1).all() for episode in labelled)
    assert json.loads((tmp_path / "labelled.json").read_text())["source_type"] == "dagger"
    with pytest.raises(ConfigError, match=r"--teacher and --intervene"):
        record_episodes(RIGHT, cfg, tmp_path / "x.h5", episodes=1, teacher=RIGHT, intervene="keyboard")


def test_an_actor_is_a_function_or_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    assert isinstance(load_actor(RIGHT, "--expert"), ExpertPolicy)
    assert load_actor(str(checkpoint), "--checkpoint").action_space.n == 2
    with pytest.raises(ConfigError, match=r"--checkpoint"):
        load_actor(str(tmp_path / "nowhere"), "--checkpoint")
    with pytest.raises(ConfigError, match=r"--expert"):
        load_actor("no_such_module:act", "--expert")


def test_an_expert_gets_arrays_and_its_actions_get_a_chunk_axis() -> None:
    keys: list[Any] = []

    def act(obs: dict[str, np.ndarray]) -> list[list[float]]:
        keys.extend(type(array) for array in obs.values())
        return [[1.0, 2.0]] * 3

    actions, extras = ExpertPolicy(act).predict_action_batch({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    assert actions.shape == (3, 1, 2) and extras == {} and keys == [np.ndarray] * 2


class Screen:
    """Environment of three slots whose pictures have the number of renderings as their value."""

    num_envs, count = 3, 0

    def render(self, slots: list[int]) -> np.ndarray:
        self.count += 1
        return np.full((len(slots), 40, 40, 3), self.count, np.uint8)


def test_a_slot_keeps_its_last_picture_after_its_episode() -> None:
    video = VideoRecorder(Screen(), 2)  # type: ignore[arg-type]
    nothing, zeros = np.zeros(3, bool), np.zeros(3)
    video.on_step_start(None, zeros)
    video.on_step_end(
        np.arange(3), zeros, np.array([True, False, False]), nothing, {"episode": {"success": np.ones(3)}}
    )
    video.on_step_start(None, zeros)
    tiles = video.frames[1]
    assert (tiles[:, 40:] == 2).all()
    assert (tiles[20, 20] == 1).all() and (tiles[0, 0] != 1).any(), (
        "the first slot has a border around its last picture"
    )
    video.on_step_end(np.arange(3), zeros, nothing, np.array([False, True, True]), {})
    video.on_step_start(None, zeros)
    assert len(video.frames) == 2, "both episodes are over"


def test_a_video_has_a_longest_length() -> None:
    video = VideoRecorder(Screen(), 2)  # type: ignore[arg-type]
    video.frames = [np.zeros((40, 80, 3), np.uint8)] * MAX_FRAMES
    video.on_step_start(None, np.zeros(3))
    assert len(video.frames) == MAX_FRAMES


def test_a_result_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"result.json: cannot be written"):
        write_result(tmp_path / "file" / "result.json", {"a": 1})
