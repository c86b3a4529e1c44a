"""One number that is not finite: the run ends before it does harm, and says where it came from; or goes on without it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tiny_run import TinyRun

from rlhpc import cli
from rlhpc.algorithms.nonfinite import tensors_of
from rlhpc.checkpoint import newest_valid
from rlhpc.checkpoint.state import load_state, load_tensors
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.jobs.paths import RunPaths

HERE = Path(__file__).parents[1]
TWO = 'cluster.component_placement={actor: "0:0-1", rollout: 0, env: 0}'
SHORT = (
    "runner.max_steps=4", "runner.save_interval=1", "runner.keep_checkpoints=2", "algorithm.rollout_steps=16",
    "algorithm.update_epochs=2", "actor.global_batch_size=32", "env.train.num_envs=4", TWO,
)  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}")


def spoiled(what: str, at: int, **more: Any) -> tuple[str, str]:
    return (
        "env.train.env_id=nonfinite_things:Spoiled-v0",
        f"env.train.kwargs={json.dumps({'what': what, 'at': at, **more})}",
    )


def all_finite(checkpoint: Path) -> bool:
    """Weights and optimizer."""
    held = [
        *load_tensors(checkpoint / "model.safetensors").items(),
        *tensors_of(load_state(checkpoint / "optimizer.pt")),
    ]
    return all(bool(tensor.isfinite().all()) for _, tensor in held)


def kept(run: TinyRun) -> list[int]:
    """Steps of the checkpoints; each of them must be sound."""
    found = RunPaths(run.root).checkpoint_steps()
    assert found and all(all_finite(path) for _, path in found)
    assert newest_valid(RunPaths(run.root)).step == found[-1][0]
    return [step for step, _ in found]


# The bad number is in the 40th step of slot 0: the 8th of the third rollout of 16.


def test_a_reward_stops_the_run_before_the_update(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, *SHORT, *spoiled("reward", 40))
    said = run.train(code=1)
    assert "step 3, decision 7: the reward of slot 0 of nonfinite_things:Spoiled-v0 (env-0) is not finite" in said
    assert "runner.resume_dir=auto" in said and "runner.on_nonfinite=skip" in said and "Traceback" not in said
    assert kept(run) == [1, 2]
    assert run.status()["state"] == "failed" and "not finite" in run.status()["stop_reason"]


def test_an_observation_is_left_out_with_what_its_slot_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = TinyRun(tmp_path, *SHORT, *spoiled("observation", 40, value="inf"), "runner.on_nonfinite=skip")
    run.train()
    assert kept(run) == [3, 4]
    assert [row.get("env/nonfinite", 0) for row in run.rows()] == [0, 0, 16, 0]
    assert all(value is not None for row in run.rows() for value in row.values())
    words = ["eval", "--run", str(run.root), "--trust-checkpoint-code", "--suite", "spoiled"]
    assert cli.main([*words, "env.eval.kwargs={what: always}"]) == 1
    said = capsys.readouterr().err
    assert "4 of 4 episodes of nonfinite_things:Spoiled-v0 have a return that is not finite" in said
    assert "the policy's weights are finite" in said and not (run.root / "eval").exists()


def test_a_gradient_stops_on_all_ranks_or_its_step_is_left_out(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, *SHORT, *spoiled("", 0), "algorithm.loss_type=nonfinite_things:broken_loss")
    said = run.train(code=1)
    assert "step 1, minibatch 0: the gradient of " in said and " is not finite (policy_loss of actor-0, " in said
    assert "policy_loss of actor-1" in said and "Traceback" not in said
    assert not RunPaths(run.root).checkpoint_steps()
    run.train("runner.on_nonfinite=skip")
    assert kept(run) == [3, 4]
    rows = run.rows()
    assert [row.get("train/nonfinite_skipped", 0) for row in rows] == [1, 0, 0, 0]
    assert [row["train/mine"] for row in rows] == [2.0] * 4  # what an own loss measures is not lost


def test_weights_that_overflow_are_not_committed(tmp_path: Path) -> None:
    """Not even where no gradient says so: here it is a buffer."""
    run = TinyRun(tmp_path, *SHORT, *spoiled("", 0), "actor.model.model_type=nonfinite_things:Overflowing")
    said = run.train(code=1)
    assert "global_step_2 (actor-0): running is not finite" in said and "actor.optim.lr" in said
    assert kept(run) == [1]


def test_what_never_brings_anything_finite_ends_even_a_run_that_skips(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, *SHORT, *spoiled("always", 0), "runner.on_nonfinite=skip", "runner.max_steps=30")
    said = run.train(code=1)
    assert "step 10: nothing that the environments brought was finite, 10 steps in a row" in said
    assert all(row["env/nonfinite"] == 64 for row in run.rows())
    first, last = (load_tensors(run.checkpoint(step) / "model.safetensors") for step in kept(run))
    assert all(torch.equal(first[name], last[name]) for name in first)  # nor did the optimizer move them


class SpoiledSac(TinyRun):
    """Off-policy learning of the same task."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        super().__init__(run_dir)
        self.root = run_dir / "pendulum_sac"
        self.overrides = [
            f"runner.run_dir={run_dir}", "runner.max_steps=6", "runner.segments=1", "runner.save_interval=1",
            "algorithm.rollout_steps=16", "env.train.num_envs=4", "actor.model.hidden_sizes=[16]", TWO,
            "algorithm.replay_buffer={size: 512, min_buffer_size: 64}", "actor.global_batch_size=32",
            "runner.logger.logger_backends=[jsonl]", *overrides,
        ]  # fmt: skip

    def command(self, *more: str) -> list[str]:
        config = str(HERE.parents[1] / "configs" / "embodied" / "pendulum_sac.yaml")
        return [word if not word.endswith("quickstart.yaml") else config for word in super().command(*more)]


def test_off_policy_transitions_stay_outside_the_buffer(tmp_path: Path) -> None:
    run = SpoiledSac(tmp_path, *spoiled("reward", 40, continuous=True), "runner.on_nonfinite=skip")
    run.train()
    assert [row.get("env/nonfinite", 0) for row in run.rows()] == [0, 0, 1, 0, 0, 0]
    assert kept(run)[-1] == 6
    stored = StoredReplay(run.checkpoint(6)).transitions()
    assert len(stored) == 6 * 64 - 4, "the other three of its row wait for the next such step"
    assert len(np.unique(stored["obs"].reshape(len(stored), -1), axis=0)) == len(stored)
    assert all(np.isfinite(stored[name]).all() for name in stored.dtype.names or ())
    (tmp_path / "stop").mkdir()
    stopped = SpoiledSac(tmp_path / "stop", *spoiled("reward", 40, continuous=True))
    assert "step 3, decision 7: the reward of slot 0" in stopped.train(code=1)
    assert kept(stopped) == [1, 2]


def demonstrations(path: Path, *, spoil: bool) -> None:
    """Three episodes, the second with a number that is not finite in what was seen."""
    random = np.random.default_rng(0)
    with TrajectoryWriter(path, env_id="MountainCarContinuous-v0") as writer:
        for _ in range(3):
            ends = np.arange(10) == 9
            writer.add({
                "obs": random.normal(size=(11, 2)).astype(np.float32), "actions": random.uniform(-1, 1, (10, 1)),
                "terminations": ends, "truncations": ~ends & False,
            })  # fmt: skip
    if spoil:
        import h5py

        with h5py.File(path, "r+") as file:
            file["traj_1/obs"][4, 1] = np.nan


def test_demonstrations_are_refused_by_file_and_episode_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    demonstrations(Path("demos.h5"), spoil=True)
    Path("bc.yaml").write_text(yaml.safe_dump({
        "runner": {"name": "bc", "task_type": "bc", "max_steps": 2}, "cluster": {"component_placement": {"actor": "0"}},
        "env": {"train": {"env_id": "MountainCarContinuous-v0"}}, "demos": {"path": "demos.h5"},
    }))  # fmt: skip
    assert cli.main(["train", "bc.yaml"]) == 2
    said = capfd.readouterr().err
    assert "demos.h5, traj_1: obs of step 4 is not finite" in said and "Traceback" not in said
    assert cli.main(["train", "bc.yaml", "runner.on_nonfinite=skip"]) == 0
    rows = [json.loads(line) for line in Path("runs/bc/metrics.jsonl").read_text().splitlines()]
    assert [(row["train/demonstrations"], row["train/nonfinite_demonstrations"]) for row in rows] == [(2.0, 1.0)] * 2
    assert all_finite(Path("runs/bc/checkpoints/global_step_2"))
