"""Evaluation of an embodied policy on several suites, with videos beside the results and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlhpc import cli
from rlhpc.embodied.data.video import shrink, tile
from tests.extras import need_extra


def test_suites_and_their_films(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_extra("embodied")
    import av

    monkeypatch.chdir(tmp_path)
    config = {
        "runner": {"name": "pole", "max_steps": 1},
        "cluster": {"component_placement": dict.fromkeys(("actor", "rollout", "env"), "0")},
        "algorithm": {"rollout_steps": 32},
        "env": {"train": {"env_id": "CartPole-v1"}, "eval": {"num_envs": 3, "num_episodes": 6, "video_episodes": 3}},
        "workflow": {"suites": {"short": ["env.eval.max_episode_steps=7", "env.eval.seed=5"]}},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["train", "run.yaml"]) == 0
    results = {}
    for suite in ("default", "short"):
        assert cli.main(["eval", "--run", "runs/pole", "--suite", suite]) == 0
        results[suite] = json.loads(Path(f"runs/pole/eval/global_step_1/{suite}.json").read_text())
    assert results["short"]["length_mean"] == 7 and results["short"]["seed"] == 5
    assert results["default"]["length_mean"] > 7

    video = Path("runs/pole/eval/global_step_1/short.mp4")
    assert video.stat().st_size < 200_000
    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 7 + 10  # a picture a step, and half a second of the end
    height, width = frames[0].shape[:2]
    assert (height, width) == (2 * 133 // 2 * 2, 2 * 200)  # 400 x 600 by 3, two by two
    assert frames[0][-20:, -20:].max() < 20  # the fourth tile stays empty
    # CartPole knows no success: a grey frame at the end.
    np.testing.assert_allclose(frames[-1][2, 50], 140, atol=20)

    assert cli.main(["report", "runs/pole"]) == 0
    page = Path("runs/pole/report/index.html").read_text()
    assert page.count("<video") == 2 and 'src="../eval/global_step_1/short.mp4"' in page


def test_tiles() -> None:
    frames = np.stack([np.full((2, 4, 3), value, np.uint8) for value in (10, 20, 30)])
    grid = tile(frames)
    assert grid.shape == (4, 8, 3)
    assert [grid[0, 0, 0], grid[0, 7, 0], grid[3, 0, 0], grid[3, 7, 0]] == [10, 20, 30, 0]
    large = np.zeros((1, 512, 700, 3), np.uint8)
    large[:, :, 1::3] = 90
    assert shrink(large).shape == (1, 170, 233, 3) and (shrink(large) == 30).all()
