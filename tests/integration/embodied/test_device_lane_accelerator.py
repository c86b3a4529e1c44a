"""A run of ManiSkill on an accelerator keeps observations there (`tests/accelerators.py`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.accelerators import ON_CPU
from tests.extras import need_extra

need_extra("embodied")
pytestmark = [pytest.mark.gpu, pytest.mark.long]
ROOT = Path(__file__).parents[3]


def test_observations_of_a_run_stay_on_it(tmp_path: Path) -> None:
    slots = 8 if ON_CPU else 1024
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / "configs" / "embodied" / "pick_cube_ppo.yaml"),
        f"runner.run_dir={tmp_path}", "runner.name=near", "runner.segments=1", "runner.max_steps=3", "runner.save_interval=-1",
        "runner.val_check_interval=-1", "runner.logger.logger_backends=[jsonl]", f"env.train.num_envs={slots}",
        "algorithm.rollout_steps=5", f"actor.global_batch_size={slots}", "algorithm.update_epochs=1",
        f"cluster.accelerators_per_node={0 if ON_CPU else 1}",
    ]  # fmt: skip
    done = warm.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "near" / "metrics.jsonl").read_text().splitlines()]
    ways = [row.get("env/on_device") for row in rows]
    assert ways[1:] == ([None, None] if ON_CPU else [1, 1])
