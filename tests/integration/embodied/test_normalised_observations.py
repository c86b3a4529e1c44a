"""Running normalisation in a run: the same for any number of actor ranks, and in a checkpoint's evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import TinyRun

from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.evaluation.evaluate import evaluate_checkpoint

SHORT = (
    "runner.max_steps=4", "runner.save_interval=4", "runner.val_check_interval=2", "env.train.num_envs=8",
    "env.eval.num_envs=2",
    "env.train.env_id=Pendulum-v1", "env.train.wrappers=[statistics, normalize_reward]", "env.train.max_episode_steps=30",
    "actor.model.normalize_observations=true",
)  # fmt: skip
RANKS = {1: '{"actor,rollout,env": 0}', 2: '{actor: "0:0-1", rollout: "0:0-1", env: 0}'}


def test_a_checkpoints_evaluation_sees_what_training_saw(tmp_path: Path) -> None:
    runs = {
        number: TinyRun(tmp_path / str(number), *SHORT, f"cluster.component_placement={ranks}")
        for number, ranks in RANKS.items()
    }
    for run in runs.values():
        run.train()
    tensors = {number: load_tensors(run.checkpoint(4) / "model.safetensors") for number, run in runs.items()}
    for name in ("count", "mean", "var"):
        one, two = (tensors[number][f"normaliser.{name}"] for number in RANKS)
        assert one.tolist() == pytest.approx(two.tolist(), rel=1e-5)
    assert tensors[1]["normaliser.count"].item() == 4 * 8 * 32
    result = evaluate_checkpoint(runs[2].checkpoint(4))
    assert result["return_mean"] == pytest.approx(runs[2].rows()[-1]["eval/return_mean"])
