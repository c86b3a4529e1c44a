"""Whole runs, started by the example entry script: they learn the same on every layout, and go on in another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint import verify
from tests import warm

ROOT = Path(__file__).parents[3]
CONFIG = """
cluster: {num_nodes: 1, accelerators_per_node: 0, component_placement: {"actor,rollout,env": 0}}
runner: {name: run, max_steps: 8, seed: 3, logger: {logger_backends: [jsonl]}}
algorithm: {rollout_steps: 32, update_epochs: 2, value_clip: 0.2, entropy_coef: 0.01, anneal_lr: true}
env: {train: {env_id: CartPole-v1, num_envs: 8}, eval: {env_id: CartPole-v1, num_envs: 4, num_episodes: 6}}
actor: {global_batch_size: 64, optim: {lr: 1.0e-3}}
"""


class Runs:
    """Starts runs below one folder, each in a process of its own, as a user does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "config.yaml").write_text(CONFIG)

    def start(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        arguments = [
            str(self.folder / "config.yaml"),
            f"runner.run_dir={self.folder}",
            f"runner.name={name}",
            *overrides,
        ]
        return warm.Popen(
            [sys.executable, str(ROOT / "examples" / "train_embodied.py"), *arguments],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def finish(self, name: str, *overrides: str) -> None:
        process = self.start(name, *overrides)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Metric rows without what a clock decides."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"global_step_{step}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """A run that nobody disturbed."""
    runs.finish("whole", "runner.save_interval=2")
    return "whole"


def test_a_run_leaves_its_files(runs: Runs, whole: str) -> None:
    folder = runs.folder / whole
    for name in ("config.yaml", "provenance.json", "metrics.jsonl", "status.json"):
        assert (folder / name).is_file()
    assert [row["step"] for row in runs.rows(whole)] == list(range(1, 9))
    row = runs.rows(whole)[-1]
    assert row["rollout/env_steps"] == 8 * 8 * 32 and row["rollout/version"] == 7
    assert {"train/episode_return", "train/policy_loss", "train/grad_norm", "train/explained_variance"} <= row.keys()
    assert verify(runs.checkpoint(whole, 8)) == []
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_each_row_has_the_episodes_that_ended_in_its_step(runs: Runs, whole: str) -> None:
    count, total, checked = 0, 0.0, 0
    for row in runs.rows(whole):
        count += row["rollout/episodes"]
        total += row["rollout/episodes"] * row.get("rollout/episode_return", 0.0)
        assert count == row["train/episodes"]
        if 0 < count <= 100:  # all that the window holds
            assert row["train/episode_return"] == pytest.approx(total / count)
            checked += 1
    assert checked


LAYOUTS = {
    "stages": ["rollout.pipeline_stage_num=2"],
    "many-ranks": ["cluster.component_placement={'actor': '0:0-1', 'rollout': '0:0-1', 'env': '0:0-1'}"],
    "odd-ranks": [
        "cluster.component_placement={'actor': '0:0-1', 'rollout': '0:0-1', 'env': '0:0-2'}",
        "rollout.pipeline_stage_num=2",
    ],
    "micro-batches": ["actor.micro_batch_size=16"],
}


@pytest.mark.parametrize("layout", ["stages", "many-ranks", "odd-ranks", "micro-batches"])
def test_every_layout_learns_the_same(runs: Runs, whole: str, layout: str) -> None:
    runs.finish(layout, *LAYOUTS[layout])
    for row, expected in zip(runs.rows(layout), runs.rows(whole), strict=True):
        assert row["train/episodes"] == expected["train/episodes"]
        for name in ("train/episode_return", "train/policy_loss", "train/value_loss", "train/grad_norm"):
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4), (row["step"], name)


def test_another_layout_resumes(runs: Runs, whole: str) -> None:
    source = f"runner.resume_dir={runs.checkpoint(whole, 4)}"
    runs.finish("moved", source, *LAYOUTS["many-ranks"], "rollout.pipeline_stage_num=2")
    moved, expected = runs.rows("moved"), runs.rows(whole)[4:]
    assert [row["step"] for row in moved] == [5, 6, 7, 8]
    assert [row["train/episodes"] for row in moved] == [row["train/episodes"] for row in expected]


def test_a_checkpoint_is_evaluated_on_its_own(runs: Runs, whole: str, tmp_path: Path) -> None:
    from rlhpc.embodied.evaluation.evaluate import evaluate_checkpoint

    output = tmp_path / "eval.json"
    result = evaluate_checkpoint(runs.checkpoint(whole, 8), output=output)
    assert result["episodes"] == 6 and result["global_step"] == 8 and result["env_id"] == "CartPole-v1"
    assert result["return_min"] <= result["return_mean"] <= result["return_max"]
    assert json.loads(output.read_text()) == result
    assert evaluate_checkpoint(runs.checkpoint(whole, 8), episodes=3)["episodes"] == 3


def test_a_run_with_checkpoints_is_not_overwritten(runs: Runs, whole: str) -> None:
    process = runs.start(whole)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "runner.resume_dir=auto" in errors
