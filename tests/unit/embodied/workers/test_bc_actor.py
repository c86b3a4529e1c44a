"""Behaviour cloning in one process: losses, minibatches, held-out episodes and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.workers.bc_actor import BcActor, check_actions, environment_of, spaces_of
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError, NonFinite

BASE = Path(__file__).resolve().parents[4] / "configs" / "base" / "bc.yaml"
EPISODES, LENGTH = 5, 24


def write_demos(path: Path, spoiled: int | None = None) -> None:
    """Episodes of Pendulum-v1 whose action is the angle's sine; the observations of one may not be finite."""
    rng = np.random.default_rng(0)
    with TrajectoryWriter(path, env_id="Pendulum-v1") as writer:
        for _ in range(EPISODES):
            obs = rng.normal(size=(LENGTH + 1, 3)).astype(np.float32)
            actions = obs[:-1, 1:2].copy()
            ends = np.arange(LENGTH) == LENGTH - 1
            writer.add({
                "obs": obs, "actions": actions, "rewards": np.ones(LENGTH, np.float32),
                "terminations": np.zeros(LENGTH, bool), "truncations": ends,
            })  # fmt: skip
    if spoiled is not None:  # a writer refuses it
        with h5py.File(path, "r+") as file:
            file[f"traj_{spoiled}"]["obs"][3, 0] = np.nan


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bc") / "demos.h5"
    write_demos(path)
    return path


def config(demos: Path, *overrides: str) -> Any:
    words = [
        "runner.name=bc", "runner.max_steps=10", "env.train.env_id=Pendulum-v1", f"demos.path={demos}", "demos.holdout=0",
        "actor.model.hidden_sizes=[16]", "actor.global_batch_size=32", "actor.optim.lr=0.01", "algorithm.update_epochs=2",
    ]  # fmt: skip
    return typed(BcConfig, load_config(BASE, [*words, *overrides]))


def start(demos: Path, *overrides: str) -> BcActor:
    actor = BcActor(config(demos, *overrides))
    actor.init_worker()
    return actor


def weights(actor: BcActor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.policy.state_dict().items()}


@pytest.mark.parametrize("loss", ["nll", "mse"])
def test_the_demonstrated_actions_are_learned(demos: Path, loss: str) -> None:
    actor = start(demos, f"algorithm.bc_loss={loss}", "demos.holdout=0.4")
    metrics = [actor.imitate(step, 0.0) for step in range(1, 16)]
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[-1]["holdout_loss"] < metrics[0]["holdout_loss"]
    assert (actor.episodes, actor.total) == (3, 3 * LENGTH) and len(actor.holdout["actions"]) == 2 * LENGTH
    assert metrics[0]["updates"] == 2 * 3, "two passes of 72 steps in minibatches of 32"
    assert "value_loss" not in metrics[0]
    obs = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    mean = actor.policy.predict_action_batch(obs, "eval")[0][:, 0]
    assert (mean - obs[:, 1:2]).abs().mean() < 0.6


def test_a_critic_learns_the_returns(demos: Path) -> None:
    actor = start(demos, "algorithm.bc_value_coef=1", "algorithm.gamma=0.5", "env.train.reward_scale=3")
    returns = actor.demos["returns"]
    assert returns[LENGTH - 1] == 3 and returns[LENGTH - 2] == 4.5, "discounted, and scaled as in the run that follows"
    losses = [actor.imitate(step, 0.0)["value_loss"] for step in range(1, 11)]
    assert losses[-1] < losses[0]


def test_micro_batches_sum_to_the_minibatch(demos: Path) -> None:
    whole, parts = start(demos), start(demos, "actor.micro_batch_size=5")
    first, second = whole.imitate(1, 0.0), parts.imitate(1, 0.0)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(tensor, weights(parts)[name], rtol=1e-3, atol=1e-4)


def test_a_checkpoint_continues_bit_for_bit(demos: Path, tmp_path: Path) -> None:
    actor = start(demos)
    actor.imitate(1, 0.0)
    actor.save(str(tmp_path))
    expected = actor.imitate(2, 0.5)
    resumed = start(demos)
    resumed.load(str(tmp_path))
    assert resumed.updates == 1 and resumed.imitate(2, 0.5) == expected
    for name, tensor in weights(actor).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_the_learning_rate_is_lowered_over_the_run(demos: Path) -> None:
    assert start(demos, "algorithm.anneal_lr=true").imitate(1, 0.75)["lr"] == pytest.approx(0.0025)
    assert start(demos).imitate(1, 0.75)["lr"] == pytest.approx(0.01)


def test_episodes_that_are_not_finite_are_left_out_or_refused(tmp_path: Path) -> None:
    write_demos(tmp_path / "demos.h5", spoiled=2)
    facts = BcActor(config(tmp_path / "demos.h5", "runner.on_nonfinite=skip")).init_worker()
    assert (facts["episodes"], facts["left_out"], facts["transitions"]) == (EPISODES - 1, 1, (EPISODES - 1) * LENGTH)
    with pytest.raises(ConfigError, match=r"demos\.h5"):
        BcActor(config(tmp_path / "demos.h5")).init_worker()


def test_a_gradient_that_is_not_finite_changes_no_weight(demos: Path) -> None:
    actor = start(demos, "runner.on_nonfinite=skip", "algorithm.update_epochs=1", "actor.global_batch_size=120")
    actor.demos["actions"][7] = torch.nan
    before = weights(actor)
    metrics = actor.imitate(1, 0.0)
    assert metrics["updates"] == 0 and all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())
    strict = start(demos, "algorithm.update_epochs=1")
    strict.demos["actions"][7] = torch.nan
    with pytest.raises(NonFinite, match=r"step 1, epoch 0, minibatch"):
        strict.imitate(1, 0.0)


def test_it_is_evaluated_in_the_environment_of_evaluations(demos: Path) -> None:
    actor = start(demos, "env.eval.num_envs=2", "env.eval.num_episodes=2", "env.eval.max_episode_steps=5")
    metrics = actor.evaluate()
    assert metrics["episodes"] == 2 and metrics["return_mean"] < 0 and actor.policy.training


def test_demonstrations_of_another_task_are_refused(demos: Path) -> None:
    with pytest.raises(ConfigError, match=r"demos\.path: .* env\.train has observations \[4\]"):
        BcActor(config(demos, "env.train.env_id=CartPole-v1")).init_worker()
    cfg = config(demos, "algorithm.bc_loss=mse")
    check_actions(cfg, spaces.Box(-1, 1, (1,), np.float32))
    with pytest.raises(ConfigError, match=r"algorithm.bc_loss is 'mse', and the actions are Discrete"):
        check_actions(cfg, spaces.Discrete(2))


def test_the_environment_of_the_demonstrations_is_that_of_training(demos: Path) -> None:
    cfg = config(demos, "env.train.kwargs={g: 5.0}", "env.train.max_episode_steps=9", "env.train.wrappers=[flatten]")
    section = environment_of(cfg)
    assert (section.env_id, section.max_episode_steps, section.kwargs) == ("Pendulum-v1", 9, {"g": 5.0})
    assert list(section.wrappers) == ["flatten"]
    observation_space, action_space = spaces_of(cfg)
    assert (observation_space.shape, action_space.shape) == ((3,), (1,))
