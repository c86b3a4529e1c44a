"""Off-policy learning from images through the real workers: it learns, resumes bit for bit, and other layouts do the same."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.data.stored_replay import StoredReplay
from tests import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CONFIG = f"""
defaults: [{ROOT}/configs/base/sac.yaml]
cluster: {{num_nodes: 1, accelerators_per_node: 0, component_placement: {{"actor,rollout,env": 0}}}}
runner: {{name: run, max_steps: 6, save_interval: 2, keep_checkpoints: 0, seed: 3, logger: {{logger_backends: [jsonl]}}}}
algorithm:
  rollout_steps: 8
  gamma: 0.9
  n_step: 3
  critic_subsample_size: 2
  actor_agg_q: mean
  random_shift: 2
  replay_buffer: {{size: 200, min_buffer_size: 32}}
env:
  train: {{env_id: "square:Square-v0", num_envs: 4, wrappers: ["square:Silent"]}}
  eval: {{num_envs: 2, num_episodes: 2}}
actor: {{global_batch_size: 16, model: {{hidden_sizes: [32, 32], num_q_heads: 4}}}}
"""
RANKS = 'cluster.component_placement={actor: "0:0-1", rollout: "0:0-1", env: "0:0-1"}'


def command(folder: Path, *words: str, timeout: float = 150) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]), "OMP_NUM_THREADS": "1"}
    done = warm.run(
        [sys.executable, "-m", "rlhpc.cli", *words], env=environment, cwd=folder, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """A run's rows, without the clock's."""
    (folder / "config.yaml").write_text(CONFIG)
    command(folder, "train", "config.yaml", f"runner.run_dir={folder}", f"runner.name={name}", *overrides)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def weights(folder: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return load_tensors(folder / "checkpoints" / f"global_step_{step}" / "model.safetensors")


def transitions(folder: Path, step: int = 6) -> np.ndarray:
    return StoredReplay(folder / "checkpoints" / f"global_step_{step}").transitions()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "whole")
    return folder


def test_a_resumed_run_goes_on_bit_for_bit(whole: Path) -> None:
    """Also the images: a checkpoint stores each once, and writes only those since the last one."""
    source, target = whole / "whole", whole / "resumed"
    shutil.copytree(source, target, symlinks=True)
    for step in (4, 6):
        shutil.rmtree(target / "checkpoints" / f"global_step_{step}")
    (target / "checkpoints" / "latest").unlink(missing_ok=True)
    train(whole, "resumed", "runner.resume_dir=auto")
    one, two = weights(source), weights(target)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert transitions(source).tobytes() == transitions(target).tobytes()
    stored = transitions(source)
    files = [path.stat() for path in (source / "checkpoints" / "global_step_6" / "replay").glob("images*.npy")]
    assert sum(status.st_size for status in files) < 1.4 * stored["obs.rgb"].nbytes, (
        "episodes have at most 12 decisions"
    )
    assert any(status.st_nlink > 1 for status in files)


def test_another_layout_learns_the_same(whole: Path) -> None:
    expected = [json.loads(line) for line in (whole / "whole" / "metrics.jsonl").read_text().splitlines()]
    for row, other in zip(train(whole, "ranks", RANKS), expected, strict=True):
        assert row["train/episodes"] == other["train/episodes"]
        assert ("train/q_loss" in row) == (row["step"] > 1)
        for name in {"train/q_loss", "train/q_value", "train/actor_loss"} & row.keys():
            assert row[name] == pytest.approx(other[name], rel=2e-2, abs=2e-3), name


def test_an_exported_policy_acts(whole: Path) -> None:
    command(whole, "eval", "--run", "whole")
    command(whole, "convert", "--run", "whole", "--output", "export")
    assert (whole / "export" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_it_learns_from_images_alone(tmp_path: Path, name: str) -> None:
    """The square is only in the picture: a policy that ignores it succeeds in a fifth of the episodes."""
    rows = train(
        tmp_path, "learns", f"algorithm.name={name}", f"actor.model.model_type={name}", "runner.max_steps=60",
        "runner.save_interval=60", "runner.val_check_interval=60", "env.eval.num_episodes=50", "algorithm.tau=0.05",
        "algorithm.rollout_steps=16", "algorithm.replay_buffer={size: 5000, min_buffer_size: 200}",
        "actor.global_batch_size=64", "actor.model.hidden_sizes=[64,64]", "algorithm.n_step=1", "actor.optim.lr=1e-3",
        # rewards are steps of at most 0.25, which entropy at the usual weight of 1 would outweigh for thousands of updates
        *(["algorithm.actor_agg_q=min"] if name == "td3" else ["algorithm.initial_alpha=0.02"]),
    )  # fmt: skip
    success = [row["eval/success_once"] for row in rows if "eval/success_once" in row]
    assert success[-1] >= 0.8, success
