"""What `tests/unit/test_card.py` runs where the accelerator of `tests.card` is: commands that use a trained policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.data.trajectories import read_trajectories
from rlhpc.embodied.evaluation import evaluate, open_loop
from rlhpc.embodied.evaluation.evaluate import evaluate_checkpoint, record_episodes
from rlhpc.embodied.evaluation.open_loop import check_open_loop
from rlhpc.embodied.preflight import check_against_demonstrations
from rlhpc.runs.configuration import load_config
from rlhpc.runs.device import device_of
from rlhpc.runs.train import train
from rlhpc.runtime.devices import accelerator

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "runner.max_steps=2", "runner.segments=1", "runner.save_interval=1", "runner.val_check_interval=-1",
    "workflow.eval_suites=[]", "algorithm.rollout_steps=32", "env.eval.num_episodes=4",
)  # fmt: skip
ON_CPU = ("cluster.accelerators_per_node=0",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a policy that was trained on the CPU."""
    folder = tmp_path_factory.mktemp("runs")
    train(
        load_config(
            ROOT / "configs/quickstart.yaml", [*SMALL, *ON_CPU, f"runner.run_dir={folder}", "runner.name=small"]
        )
    )
    return folder / "small" / "checkpoints" / "global_step_2"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Types of the devices that policies were moved to."""
    moved: list[str] = []

    def settle(policy: Any, device: torch.device) -> Any:
        moved.append(device.type)
        return policy.to(device)

    monkeypatch.setattr(evaluate, "place_policy", settle)
    yield moved


def config(*overrides: str) -> PpoConfig:
    return load_config(ROOT / "configs/quickstart.yaml", [*SMALL, *overrides])  # type: ignore[return-value]


def test_an_evaluation_computes_there_with_the_same_result(checkpoint: Path, devices: list[str]) -> None:
    there, here = (evaluate_checkpoint(checkpoint, cfg=config(*words)) for words in ((), ON_CPU))
    assert devices == [accelerator(), "cpu"] == ["card", "cpu"]
    assert there["return_mean"] == here["return_mean"]


def test_a_policy_is_checked_against_demonstrations_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demos = tmp_path / "demos.h5"
    record_episodes(str(checkpoint), config(*ON_CPU), demos, episodes=4)
    policies = list[Any]()

    def compare(policy: Any, *given: Any, **options: Any) -> Any:
        policies.append(policy)
        return check_open_loop(policy, *given, **options)

    monkeypatch.setattr(open_loop, "check_open_loop", compare)
    result = check_against_demonstrations(checkpoint, [str(demos)], num_episodes=4, num_frames=64)
    assert [device_of(policy).type for policy in policies] == ["card"]
    result_of_cpu = check_open_loop(policies[0].cpu(), read_trajectories([demos], limit=4, key="demos"), num_frames=64)
    assert result.errors == result_of_cpu.errors and result.faults == result_of_cpu.faults


def test_recorded_actions_are_the_same(checkpoint: Path, devices: list[str], tmp_path: Path) -> None:
    actions = []
    for name, words in (("there", ()), ("here", ON_CPU)):
        record_episodes(str(checkpoint), config(*words), tmp_path / f"{name}.h5", episodes=2, teacher=str(checkpoint))
        with h5py.File(tmp_path / f"{name}.h5") as file:
            actions.append(np.concatenate([file[f"traj_{number}"]["actions"][:] for number in range(2)]))
    assert devices == ["card", "card", "cpu", "cpu"]
    np.testing.assert_array_equal(*actions)
