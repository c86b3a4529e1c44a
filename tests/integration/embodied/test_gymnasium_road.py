"""The configurations of simulators on gymnasium's road, in a Python of their own: `make setup-simulators` (see the how-to)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.typed import plain
from rlhpc.runs.configuration import load_config
from tests import warm
from tests.extras import find_python, need_extra, needs_python

ROOT = Path(__file__).resolve().parents[3]
PYTHON = find_python("simulators")
pytestmark = needs_python("simulators")

GOALS = {"achieved_goal": ["float32", 3], "desired_goal": ["float32", 3], "observation": ["float32", 10]}
#: What the policy sees of each.
SEEN: dict[str, Any] = {
    "fetch_reach": GOALS,
    "cheetah_run": {"position": ["float32", 8], "velocity": ["float32", 9]},
    "pusht": ["float32", 5],
    "pusht_pixels": {"agent_pos": ["float32", 2], "pixels": ["uint8", 96, 96, 3]},
    "minigrid": ["float32", 7, 7, 20],
    "breakout": ["uint8", 4, 84, 84],
    "panda_pick_hil": ["float32", 10],
}


@pytest.mark.long
def test_each_is_played_and_taken_over_mid_episode(tmp_path: Path) -> None:
    sections = {}
    for name in SEEN:
        train = plain(load_config(ROOT / f"configs/embodied/{name}.yaml", []).env.train)
        sections[name] = {key: train[key] for key in ("env_id", "kwargs", "wrappers")}
    sections |= {
        "adroit_door": {"env_id": "gymnasium_robotics:AdroitHandDoor-v1"},  # its resets change the model
        "pusht_normalized": {**sections["pusht"], "wrappers": ["normalize"]},  # which counts over episodes
    }
    (tmp_path / "sections.json").write_text(json.dumps(sections))
    command = [PYTHON, "-m", "tests.integration.embodied.played", str(tmp_path / "sections.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout.splitlines()[-1])
    game = found.pop("game")
    for name, saw in found.items():
        assert saw["obs"] == SEEN.get(name, saw["obs"]), name
        assert saw["supports_state"] and saw["equal"] and saw["ends"] >= 4, (name, saw)
        assert saw["frames"][0] == 1 and saw["frames"][-1] == 3 and saw["bright"] > 5, (name, saw)
        succeeds = {"success_once", "success_at_end"} <= set(saw["reported"])
        assert succeeds == name.startswith(("fetch", "pusht", "adroit", "panda")), (name, saw)
    # Five lives are five ends for the learner, one game in the report, whose points are not those that it learns from.
    assert game["ends"] == 5 and game["steps"] == game["length"] > 50 and game["return"] >= game["points"] >= 0


def test_a_run_and_its_evaluation(tmp_path: Path) -> None:
    need_extra("embodied")  # videos
    run = ["configs/embodied/fetch_reach.yaml", f"runner.run_dir={tmp_path}", "runner.max_steps=2", "runner.segments=1",
           "runner.save_interval=1", "algorithm.replay_buffer.min_buffer_size=40", "actor.global_batch_size=32",
           f"env.train.simulator_python={PYTHON}"]  # fmt: skip
    rlhpc = [sys.executable, "-m", "rlhpc.cli"]
    warm.run([*rlhpc, "train", *run], check=True, cwd=ROOT, timeout=240)
    metrics = [json.loads(line) for line in (tmp_path / "fetch_reach/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["rollout/env_steps"] == 64 and "train/success_once" in metrics[-1]
    few = [
        "env.eval.num_envs=1",
        "env.eval.num_episodes=1",
        "env.eval.video_episodes=1",
        "env.eval.max_episode_steps=5",
    ]
    evaluated = [*rlhpc, "eval", "--run", str(tmp_path / "fetch_reach"), "--step", "latest", "--trust-checkpoint-code"]
    warm.run([*evaluated, "--suite", "default", *few], check=True, cwd=ROOT, timeout=240)
    found = tmp_path / "fetch_reach/eval/global_step_2"
    assert (
        json.loads((found / "default.json").read_text())["episodes"] == 1
        and (found / "default.mp4").stat().st_size > 500
    )
