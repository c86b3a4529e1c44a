"""Fixtures of the tests of reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import MetricLogger
from tests.unit.language.reporting.language_runs import CONFIG, evaluate, rows


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths.from_run_dir(tmp_path, "sums")
    paths.root.mkdir()
    paths.config.write_text(CONFIG % "reasoning")
    with MetricLogger(paths, ["jsonl"]) as logger:
        for step in range(1, 21):
            values = {"train/reward": step / 20, "train/accuracy": step / 25, "train/response_tokens": 30.0 - step,
                      "train/mismatch_kl": 1e-6 * step, "train/my_own_metric": step**2,
                      "reward/math": step / 25, "reward/format": 0.1 + step / 1000,
                      "rollout/samples": step * 64.0, "train/constant": 1.0}  # fmt: skip
            times = {
                "time/step_s": 2.0,
                "time/rollout_s": 1.0,
                "time/update_s": 0.5,
                "time/generate_s": 1.2,
                "time/tokens_per_s": 900.0 + step,
            }
            logger.log(step, {**values, **times, "time/wall_s": 2.0 * step})
    for step, right in ((10, 4), (20, 7)):
        evaluate(paths, step, "default", rows(10, right, samples=4))
    return paths
