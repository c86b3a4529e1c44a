"""Training begins on the first part of a rollout while the rest is played: the simulators stand still until it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhpc.checkpoint.state import load_tensors
from tests.integration.embodied.test_layouts import Runs
from tests.integration.embodied.uneven import DECISIONS

SLOTS = 8
MODULE = "tests.integration.embodied.uneven"
PARTS = (
    "runner.max_steps=3", "runner.save_interval=3", f"algorithm.rollout_steps={DECISIONS}", "algorithm.rollout_parts=2",
    f"env.train.num_envs={SLOTS}", f"env.train.env_type={MODULE}:HeldHalfway", "env.eval.env_type=gymnasium",
    f"actor.model.model_type={MODULE}:Telling",
)  # fmt: skip
PIPELINE = "runner.use_training_pipeline=true"


def test_the_gradient_of_the_whole_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One minibatch an epoch: its first micro-batches are those of the first part, and the sum is that of all."""
    batch = (
        f"actor.global_batch_size={SLOTS * DECISIONS}", "actor.micro_batch_size=64",
        "algorithm.normalize_advantages=none",
    )  # fmt: skip
    runs = Runs(tmp_path)
    runs.finish("after", *PARTS, *batch)
    monkeypatch.setenv("RLHPC_TEST_HELD", str(tmp_path))
    runs.finish("meanwhile", *PARTS, *batch, PIPELINE)
    assert (tmp_path / "trained").exists()
    for row, expected in zip(runs.rows("meanwhile"), runs.rows("after"), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)
    found, weights = (load_tensors(runs.checkpoint(name, 3) / "model.safetensors") for name in ("meanwhile", "after"))
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)


ALGORITHMS = {
    "gae": (),
    "grpo": (
        "algorithm.adv_type=grpo", "env.train.auto_reset=false", "env.train.group_size=2", "algorithm.value_coef=0",
        "env.train.max_episode_steps=14",
    ),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_learned_does_not_depend_on_who_waits(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = (
        *PARTS, PIPELINE, *ALGORITHMS[algorithm], "actor.global_batch_size=32",
        "cluster.component_placement={'actor': '0:0-1', 'rollout': '0', 'env': '0:0-1'}",
    )  # fmt: skip
    runs = Runs(tmp_path)
    runs.finish("free", *layout)
    monkeypatch.setenv("RLHPC_TEST_HELD", str(tmp_path))
    runs.finish("held", *layout)
    rows = runs.rows("held")
    assert (tmp_path / "trained").exists() and rows == runs.rows("free")
    if algorithm == "grpo":
        assert all(row["rollout/episodes"] == 2 * SLOTS and row["train/grad_norm"] > 0 for row in rows)
