"""Whole runs whose actor ranks simulate and act on tensors: they equal those with env and rollout ranks, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import warm

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/embodied/cartpole_tensors.yaml"
SMALL = (
    "cluster.accelerators_per_node=0", "runner.max_steps=4", "runner.save_interval=2", "runner.segments=1",
    "runner.logger.logger_backends=[jsonl]", "runner.val_check_interval=2", "algorithm.rollout_steps=12",
    "algorithm.update_epochs=2", "env.train.num_envs=33", "env.eval.num_envs=4", "env.eval.num_episodes=6",
    "env.eval.max_episode_steps=20", "actor.global_batch_size=132", "env.train.max_episode_steps=15",
)  # fmt: skip
SAC_CONFIG = ROOT / "configs/embodied/pendulum_sac_tensors.yaml"
#: The ring of the buffer wraps around, and episodes end within a step.
SAC = (
    *SMALL[:7], "env.eval.num_envs=2", "env.eval.num_episodes=3", "env.eval.max_episode_steps=10", "algorithm.rollout_steps=6",
    "env.train.num_envs=7", "env.train.max_episode_steps=5", "actor.global_batch_size=24", "actor.model.hidden_sizes=[16,16]",
    "algorithm.update_to_data=0.25", "algorithm.replay_buffer.size=100", "algorithm.replay_buffer.min_buffer_size=21",
)  # fmt: skip
ARRAYS = "cluster.component_placement={'actor,rollout,env': 0}"
#: An odd number of slots on each rank, because kernels depend on sizes and alignment.
TWO_RANKS = ("env.train.num_envs=34", "actor.global_batch_size=102", "actor.model.normalize_observations=true")
GRPO = (
    "algorithm.adv_type=grpo", "env.train.auto_reset=false", "env.train.group_size=4", "algorithm.value_coef=0",
    "env.train.env_id=pendulum", "actor.model.num_action_chunks=2", "algorithm.logprob_type=action_level",
    "env.train.max_episode_steps=9", "env.train.num_envs=36", "actor.global_batch_size=108",
)  # fmt: skip
PICTURES = (
    "env.train.env_id=tests.integration.embodied.odd_tensors:Pictures", "actor.model.model_type=cnn", "env.train.num_envs=5",
    "actor.global_batch_size=60", "algorithm.update_epochs=1",
)  # fmt: skip
SKIP = ("env.train.env_id=tests.integration.embodied.odd_tensors:Spoiled", "runner.on_nonfinite=skip")


class Runs:
    """Starts runs below one folder, each in a process of its own, as a user does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, name: str, *overrides: str, command: str = "train") -> tuple[int, str]:
        config, small = (SAC_CONFIG, SAC) if name.startswith("sac") else (CONFIG, SMALL)
        done = warm.run(
            [sys.executable, "-m", "rlhpc.cli", command, str(config), *small, f"runner.run_dir={self.folder}",
             f"runner.name={name}", *overrides],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=280,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def finish(self, name: str, *overrides: str) -> None:
        code, output = self.start(name, *overrides)
        assert code == 0, output

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Metric rows without what a clock decides."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"global_step_{step}"

    def assert_equal(self, name: str, other: str, steps: int = 4) -> None:
        """Asserts that the last rows and the last weights are the same, bit for bit."""
        for row, expected in zip(self.rows(name)[-steps:], self.rows(other)[-steps:], strict=True):
            assert json.dumps(row, sort_keys=True) == json.dumps(expected, sort_keys=True)
        weights, others = (load_file(self.checkpoint(run, 4) / "model.safetensors") for run in (name, other))
        assert weights.keys() == others.keys() and all(weights[key].equal(others[key]) for key in weights)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def tensors(runs: Runs) -> str:
    """A run of the example's actor alone."""
    runs.finish("tensors")
    return "tensors"


def test_a_plan_places_the_actor_alone(runs: Runs) -> None:
    code, output = runs.start("planned", command="plan")
    assert code == 0 and "actor: rank 0" in output and "rollout: rank" not in output and "env: rank" not in output, (
        output
    )


def test_a_run_without_arrays_learns_the_same(runs: Runs, tensors: str) -> None:
    runs.finish("arrays", ARRAYS)
    runs.assert_equal(tensors, "arrays")
    rows = runs.rows(tensors)
    assert (
        rows[-1]["train/episodes"] > 50
        and "eval/return_mean" in rows[1]
        and rows[-1]["rollout/env_steps"] == 4 * 12 * 33
    )


def test_a_run_goes_on_where_it_was_also_with_other_ranks(runs: Runs, tensors: str) -> None:
    source = f"runner.resume_dir={runs.checkpoint(tensors, 2)}"
    for name, layout in (("resumed", ()), ("resumed_as_arrays", (ARRAYS,))):
        runs.finish(name, source, *layout)
        runs.assert_equal(name, tensors, steps=2)


@pytest.mark.parametrize("words", [GRPO, PICTURES, SKIP], ids=["grpo", "pictures", "skip"])
def test_other_settings_give_the_same_on_both_roads(runs: Runs, words: tuple[str, ...], request: Any) -> None:
    name = request.node.callspec.id
    runs.finish(f"{name}_tensors", *words)
    runs.finish(f"{name}_arrays", ARRAYS, *words)
    runs.assert_equal(f"{name}_tensors", f"{name}_arrays")
    if words is SKIP:
        assert all(row["env/nonfinite"] > 0 for row in runs.rows("skip_tensors"))


def test_two_ranks_train_together(runs: Runs) -> None:
    runs.finish("two_tensors", *TWO_RANKS, "cluster.component_placement={'actor': '0:0-1'}")
    runs.finish("two_arrays", *TWO_RANKS, "cluster.component_placement={'actor,rollout,env': '0:0-1'}")
    runs.assert_equal("two_tensors", "two_arrays")


def test_a_number_that_is_not_finite_ends_the_run_with_its_slot(runs: Runs) -> None:
    code, output = runs.start("stopped", SKIP[0])
    assert code != 0 and "decision " in output and "Spoiled (actor-0) is not finite" in output


def test_an_off_policy_run_without_arrays_learns_and_resumes_the_same(runs: Runs) -> None:
    """CrossQ has running statistics in its actor; three rewards are summed up for each target."""
    words = ("algorithm.name=crossq", "actor.model.model_type=crossq", "algorithm.n_step=3")
    runs.finish("sac_tensors", *words)
    runs.finish("sac_arrays", ARRAYS, *words)
    runs.assert_equal("sac_tensors", "sac_arrays")
    rows = runs.rows("sac_tensors")
    assert rows[-1]["train/updates"] > 20 and rows[-1]["train/buffer_size"] == 98 and "eval/return_mean" in rows[1]
    runs.finish("sac_resumed", f"runner.resume_dir={runs.checkpoint('sac_arrays', 2)}", *words)
    runs.assert_equal("sac_resumed", "sac_tensors", steps=2)
