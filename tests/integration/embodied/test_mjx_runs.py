"""Whole runs of MJX's tasks in the Python that has them: JAX simulates, torch acts and learns, in one process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.extras import find_python, needs_python

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/embodied/inverted_pendulum_mjx.yaml"
SMALL = (
    "cluster.accelerators_per_node=0", "runner.max_steps=4", "runner.save_interval=2", "runner.segments=1",
    "runner.logger.logger_backends=[jsonl]", "algorithm.rollout_steps=8", "algorithm.update_epochs=1",
    "env.train.num_envs=6", "env.train.max_episode_steps=5", "actor.global_batch_size=24",
)  # fmt: skip


def train(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [find_python("simulators"), "-m", "rlhpc.cli", "train", str(CONFIG), *SMALL, f"runner.run_dir={folder}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, f"runner.name={name}", *overrides],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
    )


@pytest.mark.long
@needs_python("simulators")
def test_a_run_and_its_continuation(tmp_path: Path) -> None:
    done = train(tmp_path, "complete")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "complete/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[-1]["rollout/env_steps"] == 4 * 8 * 6
    assert rows[-1]["train/episodes"] >= 6 and 0 < rows[-1]["train/episode_return"] <= 5
    checkpoints = tmp_path / "complete/checkpoints"
    done = train(tmp_path, "continued", f"runner.resume_dir={checkpoints / 'global_step_2'}")
    assert done.returncode == 0, done.stdout + done.stderr
    weights, others = (
        load_file(tmp_path / name / "checkpoints/global_step_4/model.safetensors") for name in ("complete", "continued")
    )
    assert all(weights[key].equal(others[key]) for key in weights)
