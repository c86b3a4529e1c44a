"""Observations of several inputs through the real roles: another layout learns the same, a resumed run goes on bit for bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.checkpoint.state import load_tensors
from tests import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CONFIG = """
cluster: {num_nodes: 1, accelerators_per_node: 0, component_placement: {"actor,rollout,env": 0}}
runner: {name: run, max_steps: 4, save_interval: 2, seed: 3, logger: {logger_backends: [jsonl]}}
algorithm: {rollout_steps: 16, update_epochs: 2, gamma: 0.9}
env: {train: {env_id: "square:Square-v0", num_envs: 4, wrappers: ["square:NumbersOnly"]}, eval: {num_envs: 2, num_episodes: 2}}
actor: {global_batch_size: 32, optim: {lr: 1.0e-3}}
"""
#: Two rollout ranks cut what one env rank sends.
RANKS = "cluster.component_placement={'actor': '0:0-1', 'rollout': '0:0-1', 'env': '0'}"


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """A run's rows, without the clock's."""
    (folder / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "rlhpc.cli", "train", str(folder / "config.yaml"), f"runner.run_dir={folder}"]
    path = os.pathsep.join([str(ROOT), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = warm.run(
        [*command, f"runner.name={name}", *overrides], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "whole")
    return folder


def test_another_layout_learns_the_same(whole: Path) -> None:
    expected = [json.loads(line) for line in (whole / "whole" / "metrics.jsonl").read_text().splitlines()]
    for row, other in zip(run(whole, "ranks", RANKS, "rollout.pipeline_stage_num=2"), expected, strict=True):
        assert row["train/episodes"] == other["train/episodes"]
        for name in ("train/policy_loss", "train/value_loss", "train/grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-2, abs=1e-4), name


def test_a_resumed_run_goes_on_bit_for_bit(whole: Path) -> None:
    source = whole / "whole" / "checkpoints" / "global_step_2"
    run(whole, "resumed", f"runner.resume_dir={source}")
    a, b = (
        load_tensors(whole / n / "checkpoints" / "global_step_4" / "model.safetensors") for n in ("whole", "resumed")
    )
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_is_exported_and_acts(whole: Path) -> None:
    from rlhpc.embodied.export import export_checkpoint, load_exported

    policy = load_exported(export_checkpoint(whole / "whole" / "checkpoints" / "global_step_4", whole / "export"))
    obs = {"position": torch.zeros(3, 2), "goal": torch.ones(3, 2)}
    assert policy.predict_action_batch(obs, mode="eval")[0].shape == (3, 1, 2)


CHUNKS = [
    "actor.model.num_action_chunks=3", "algorithm.logprob_type=token_level", "algorithm.reward_type=action_level",
    "algorithm.rollout_steps=6",
]  # fmt: skip
KINDS = {
    "ppo": [*CHUNKS, "actor.model.value_per_action=true", "actor.global_batch_size=12"],
    "grpo": [
        *CHUNKS, "algorithm.adv_type=grpo", "env.train.group_size=2", "env.train.auto_reset=false",
        "env.train.ignore_terminations=true", "env.eval.ignore_terminations=false",
        "algorithm.value_coef=0", "actor.global_batch_size=24",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_groups_learn_the_same_on_other_ranks(whole: Path, kind: str) -> None:
    expected = run(whole, kind, *KINDS[kind])
    rows = run(whole, f"{kind}-ranks", *KINDS[kind], RANKS)
    for row, other in zip(rows, expected, strict=True):
        assert row["train/episodes"] == other["train/episodes"] > 0
        # Up to two of a chunk's three actions are not executed where an episode ends.
        assert 0 <= 4 * row["step"] * 18 - row["rollout/env_steps"] <= 2 * row["train/episodes"]
        assert row["rollout/env_steps"] == other["rollout/env_steps"]
        for name in ("train/policy_loss", "train/value_loss", "train/grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=1e-2, abs=1e-4), name
    if kind != "ppo":  # one episode a slot and step
        assert [row["train/episodes"] for row in rows] == [4, 8, 12, 16]
        assert {row["train/value_loss"] for row in rows} == {0.0}


#: Policies that see pictures and numbers, from pretrained weights that stay as they are.
SEEING = {
    "resnet10": {},
    "flow": {
        "encoder": "resnet10", "num_steps": 2, "noise_method": "flow_noise",
        "network": "transformer", "width": 16, "heads": 2,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("model_type", SEEING)
def test_a_policy_that_sees_is_resumed_exported_and_evaluated(model_type: str, tmp_path: Path) -> None:
    """A resumed run goes on bit for bit; evaluation and export need the checkpoint alone."""
    from rlhpc.embodied.export import export_checkpoint, load_exported
    from rlhpc.embodied.models.resnet10 import ResNet10

    torch.manual_seed(0)
    pretrained = ResNet10().state_dict()
    weights = tmp_path / "weights.pt"
    torch.save(pretrained, weights)
    kwargs = {**SEEING[model_type], "weights": str(weights), "freeze": True}
    changes = [
        "env.train.wrappers=['square:Silent']", f"actor.model.model_type={model_type}", f"actor.model.kwargs={kwargs}",
        "actor.model.num_action_chunks=2", "algorithm.logprob_type=action_level", "actor.model.value_per_action=true",
        "algorithm.reward_type=action_level", "algorithm.rollout_steps=4", "algorithm.entropy_coef=0.01",
        "actor.global_batch_size=8",
    ]  # fmt: skip
    rows = run(tmp_path, "whole", *changes)
    assert all(row["train/entropy"] and row["train/value_loss"] > 0 for row in rows)
    checkpoints = tmp_path / "whole" / "checkpoints"
    run(tmp_path, "resumed", *changes, f"runner.resume_dir={checkpoints / 'global_step_2'}")
    first, last, resumed = (
        load_tensors(folder / "model.safetensors")
        for folder in (checkpoints / "global_step_2", checkpoints / "global_step_4",
                       tmp_path / "resumed" / "checkpoints" / "global_step_4")
    )  # fmt: skip
    assert last.keys() == resumed.keys() and all(torch.equal(last[name], resumed[name]) for name in last)
    changed = {name for name in last if not torch.equal(first[name], last[name])}
    backbone = {name for name in last if ".backbone." in name}
    assert changed and len(backbone) == len(pretrained) and not changed & backbone
    weights.unlink()
    done = warm.run(
        [sys.executable, "-m", "rlhpc.cli", "eval", "--run", str(tmp_path / "whole"), "--step", "latest"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    policy = load_exported(export_checkpoint(checkpoints / "global_step_4", tmp_path / "export"))
    obs = {"rgb": torch.zeros(3, 16, 16, 3, dtype=torch.uint8), "state": torch.zeros(3, 2)}
    assert policy.predict_action_batch(obs, mode="eval")[0].shape == (3, 2, 2)
