"""Advantage conditioning, by the commands a user types: what is played well and badly is cloned, and the good is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rlhpc import cli, load_exported
from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories

pytestmark = pytest.mark.long(together=True)


def good(obs: np.ndarray) -> np.ndarray:
    """MountainCarContinuous: pushes away from the valley's bottom."""
    return np.sign(obs[:, :1] + 0.35)


BC = {
    "runner": {"name": "bc", "task_type": "bc", "max_steps": 10},
    "cluster": {"component_placement": {"actor": "0"}},
    "algorithm": {"update_epochs": 10, "bc_value_coef": 1.0, "gamma": 0.0},
    "actor": {"optim": {"lr": 3e-3}},
    "env": {
        "train": {"env_id": "MountainCarContinuous-v0", "max_episode_steps": 200, "reward_scale": 1.0},
        "eval": {"num_episodes": 2, "num_envs": 2},
    },
    "demos": {"path": "mixed.h5"},
}  # fmt: skip
TOLD = [
    "algorithm.bc_value_coef=0", "algorithm.value_model=critic", "actor.model.model_type=conditioned",
    "actor.model.kwargs.of=mlp", "algorithm.advantage_steps=1", "algorithm.improved_fraction=0.4",
]  # fmt: skip


def run(*words: str) -> int:
    return cli.main(list(words))


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with episodes whose every step is good or the opposite, by lot, and is paid for being good; and a clone of
    them, whose critic learned what is to be expected."""
    folder, rng = tmp_path_factory.mktemp("conditioning"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("bc.yaml").write_text(yaml.safe_dump(BC))
        with TrajectoryWriter(Path("mixed.h5"), env_id="MountainCarContinuous-v0") as writer:
            for _ in range(40):
                obs = rng.uniform((-1.2, -0.07), (0.5, 0.07), (51, 2)).astype(np.float32)
                well = rng.random(50) < 0.4
                ended = np.arange(50) == 49
                writer.add({
                    "obs": obs, "actions": good(obs[:-1]) * np.where(well, 1, -1)[:, None], "rewards": well.astype(np.float32),
                    "terminations": ended, "truncations": ended & False,
                })  # fmt: skip
        assert run("train", "bc.yaml", "runner.name=plain") == 0
        shutil.copytree("runs/plain/checkpoints/global_step_10", "critic")
    return folder


@pytest.fixture
def here(critic: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(critic)
    return critic


def weights(name: str) -> dict[str, Any]:
    return load_tensors(Path(f"runs/{name}/checkpoints/global_step_10/model.safetensors"))


def test_the_good_is_asked_for(here: Path) -> None:
    """The clone does the mean of what it was shown; told what was an improvement, it does the good, and told that something
    is none, the opposite. It acts in evaluation and by its export, and PPO goes on from it."""
    assert run("train", "bc.yaml", "runner.name=told", *TOLD) == 0
    seen = torch.from_numpy(np.concatenate([each["obs"][:-1] for each in read_trajectories("mixed.h5")]))

    @torch.no_grad()
    def alike(policy: Any, obs: Any) -> float:
        """1 where it does the good everywhere, −1 where it does the opposite."""
        return float((policy.predict_action_batch(obs, mode="eval")[0][:, 0].numpy() * good(seen.numpy())).mean())

    told = load_exported("runs/told/checkpoints/global_step_10")
    opposite = alike(told.inner, {"state": seen, "improvement": -torch.ones(len(seen), 1)})
    assert alike(load_exported("runs/plain/checkpoints/global_step_10"), seen) < 0.1
    assert alike(told, seen) > 0.5 and opposite < -0.5

    assert run("eval", "--run", "runs/told") == 0
    assert run("convert", "--run", "runs/told") == 0
    program = torch.export.load("runs/told/export/global_step_10/policy.pt2").module()
    torch.testing.assert_close(program(seen[:3]), told.predict_action_batch(seen[:3], mode="eval")[0])

    played = {**BC, "runner": {"name": "ppo", "max_steps": 1}, "cluster": {"component_placement": {"actor,rollout,env": "0"}},
              "algorithm": {"rollout_steps": 32}, "demos": None}  # fmt: skip
    Path("ppo.yaml").write_text(yaml.safe_dump({key: value for key, value in played.items() if value is not None}))
    assert run("train", "ppo.yaml", "runner.init_from=runs/told", *TOLD[2:4]) == 0


def test_it_resumes_to_the_last_bit_and_with_the_same_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A critic that makes other steps improvements is refused: half of the run would have learned something else."""
    words = [*TOLD, "actor.model.kwargs.of=flow"]
    assert run("train", "bc.yaml", "runner.name=one", "runner.save_interval=5", *words) == 0
    start = f"runner.resume_dir={here}/runs/one/checkpoints/global_step_5"
    assert run("train", "bc.yaml", "runner.name=again", start, *words) == 0
    for name, value in weights("one").items():
        assert (value == weights("again")[name]).all(), name
    capsys.readouterr()
    assert run("train", "bc.yaml", "runner.name=other", start, *words, "algorithm.improved_fraction=0.5") != 0
    assert "makes other steps improvements" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.value_model=critic"], "actor.model.model_type"),
        (["actor.model.model_type=conditioned", "actor.model.kwargs.of=mlp"], "algorithm.value_model"),
        ([*TOLD, "algorithm.value_model=nowhere"], "algorithm.value_model is 'nowhere', which is no folder"),
        ([*TOLD, "actor.model.kwargs.of=vla"], "actor.model.kwargs.of is 'vla'; allowed: mlp, cnn"),
        ([*TOLD, "actor.model.kwargs.unconditioned=2"], "actor.model.kwargs.unconditioned is 2"),
        ([*TOLD, "actor.model.kwargs.gain=2"], "gain"),
        ([*TOLD, "algorithm.bc_loss=mse"], "learns by nll"),
        ([*TOLD, "env.train.env_id=Pendulum-v1"], "env.train has Box"),
    ],
)
def test_what_is_said_of_a_mistake(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Before anything starts, and nothing is written."""
    assert run("train", "bc.yaml", "runner.name=wrong", *words) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs/wrong").exists()
