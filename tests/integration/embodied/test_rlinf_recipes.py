"""The configurations of the page about RLinf's recipes train, do what their keys say, and go on after a resume bit for bit."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.checkpoint.state import load_tensors
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/how-to/rlinf-recipes.md").read_text(), re.M | re.S)
SMALL = [
    "runner.max_steps=4", "runner.save_interval=2", "runner.logger.logger_backends=[jsonl]", "algorithm.rollout_steps=32",
    "algorithm.update_epochs=2", "actor.global_batch_size=64", "actor.model.hidden_sizes=[16]",
]  # fmt: skip


class Run:
    """A run of a block of the page, with few and small steps."""

    def __init__(self, folder: Path, content: str) -> None:
        (folder / "base").symlink_to(ROOT / "configs/base")
        (folder / "mine").mkdir()
        self.config, self.folder = folder / "mine/page.yaml", folder / "runs"
        self.config.write_text(content)
        self.root = self.folder / re.findall(r"name: (\w+)", content)[0]

    def train(self, *more: str) -> list[dict[str, Any]]:
        command = [
            sys.executable,
            "-m",
            "rlhpc.cli",
            "train",
            str(self.config),
            *SMALL,
            f"runner.run_dir={self.folder}",
            *more,
        ]
        done = warm.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "no effect" not in done.stderr
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_tensors(self.root / f"checkpoints/global_step_{step}/model.safetensors")

    def resumed(self, step: int, *more: str) -> dict[str, torch.Tensor]:
        """Weights of the last step when the run goes on from a checkpoint."""
        shutil.rmtree(self.root / "checkpoints/global_step_4")
        self.train(f"runner.resume_dir=global_step_{step}", *more)
        return self.weights(4)


def changed(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> set[str]:
    return {name.partition(".")[0] for name, weight in first.items() if not torch.equal(weight, second[name])}


@pytest.mark.timeout(600)
def test_ppo_warms_its_critic_up_with_its_own_learning_rate(tmp_path: Path) -> None:
    """A step has eight optimizer steps; the warm-up ends within the third."""
    run, warmup = Run(tmp_path, BLOCKS[0]), "actor.optim.critic_warmup_steps=20"
    rows = run.train(warmup)
    assert rows[0]["train/lr"] == 3e-4 and rows[-1]["train/lr"] > 1e-5
    second, last = run.weights(2), run.weights(4)
    assert changed(second, last) == {"actor", "critic", "head"}
    untrained = run.train(warmup, "runner.name=untrained", "runner.max_steps=1", "actor.optim.critic_warmup_steps=100")
    assert len(untrained) == 4  # the rows of the first run, in whose folder `Run` reads
    first = load_tensors(run.folder / "untrained/checkpoints/global_step_1/model.safetensors")
    assert changed(first, second) == {"critic"}, "the policy stays as it was made while the critic trains"
    for name, weight in run.resumed(2, warmup).items():
        assert torch.equal(weight, last[name]), name


@pytest.mark.timeout(600)
def test_grpo_leaves_out_groups_by_their_return(tmp_path: Path) -> None:
    """Returns are a hundredth of the episode's steps, of which there are at most 32: the bounds cut at 20 steps."""
    bounds = ("algorithm.rewards_lower_bound=0.2", "algorithm.rewards_upper_bound=0.25")
    run = Run(tmp_path, BLOCKS[1])
    rows = run.train(*bounds)
    filtered = [row.get("env/filtered", 0) for row in rows]
    assert any(filtered) and all(row["train/lr"] <= 1e-3 for row in rows)
    last = run.weights(4)
    for name, weight in run.resumed(2, *bounds).items():
        assert torch.equal(weight, last[name]), name
    everything = ("algorithm.rewards_lower_bound=5", "algorithm.rewards_upper_bound=6", "runner.name=nothing")
    run.train(*everything)
    row = json.loads((run.folder / "nothing/metrics.jsonl").read_text().splitlines()[-1])
    assert row["train/epochs"] == 0 and row["env/filtered"] > 0
    kept = load_tensors(run.folder / "nothing/checkpoints/global_step_2/model.safetensors")
    assert not changed(kept, load_tensors(run.folder / "nothing/checkpoints/global_step_4/model.safetensors"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("noise", ["noise_steps: one", "noise_method: flow_noise"])
def test_ppo_trains_a_policy_that_acts_by_a_flow(tmp_path: Path, noise: str) -> None:
    run, options = Run(tmp_path, BLOCKS[0]), f"actor.model.kwargs={{num_steps: 3, {noise}}}"
    flow = ("actor.model.model_type=flow", options, "algorithm.entropy_coef=0.01", "actor.optim.critic_warmup_steps=0")
    rows = run.train(*flow)
    numbers = [row[f"train/{name}"] for row in rows for name in ("policy_loss", "value_loss", "entropy", "grad_norm")]
    assert all(map(math.isfinite, numbers)) and all(row["train/approx_kl"] != 0 for row in rows)
    last = run.weights(4)
    assert changed(run.weights(2), last) == {"velocity", "critic"}
    for name, weight in run.resumed(2, *flow).items():
        assert torch.equal(weight, last[name]), name


@pytest.mark.timeout(600)
def test_weights_are_sent_in_every_second_step(tmp_path: Path) -> None:
    """The version of the weights that acted, without and with an evaluation after the first step, which also sends them."""
    run, interval = Run(tmp_path, BLOCKS[0]), "runner.weight_sync_interval=2"
    versions = [row["rollout/version"] for row in run.train(interval)]
    assert versions == [0, 0, 2, 2]
    last = run.weights(4)
    for name, weight in run.resumed(2, interval).items():
        assert torch.equal(weight, last[name]), name
    run.train(
        interval,
        "runner.name=evaluated",
        "runner.val_check_interval=1",
        "env.eval.num_episodes=2",
        "env.eval.num_envs=2",
    )
    rows = (run.folder / "evaluated/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["rollout/version"] for row in rows] == [0, 1, 2, 3]
