"""Behaviour cloning in one process: losses, minibatches, held-out episodes and checkpoints."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces

from bench import streaming
from rlhpc.checkpoint.state import load_state, save_state
from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.envs.registry import environment_of
from rlhpc.embodied.workers.actor import FILE
from rlhpc.embodied.workers.bc_actor import BcActor, check_actions, spaces_of
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError, NonFinite
from rlhpc.training.captured_passes import CapturedPasses
from tests.extras import need_extra
from tests.unit.training.test_captured_passes import record

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
    assert (actor.episodes, actor.total) == (3, 3 * LENGTH) and len(actor.holdout_rows) == 2 * LENGTH
    assert metrics[0]["updates"] == 2 * 3, "two passes of 72 steps in minibatches of 32"
    assert "value_loss" not in metrics[0]
    obs = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    mean = actor.policy.predict_action_batch(obs, "eval")[0][:, 0]
    assert (mean - obs[:, 1:2]).abs().mean() < 0.6


def test_a_critic_learns_the_returns(demos: Path) -> None:
    actor = start(demos, "algorithm.bc_value_coef=1", "algorithm.gamma=0.5", "env.train.reward_scale=3")
    returns = actor.stream.read(np.arange(LENGTH))["returns"]
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


def test_a_step_may_be_a_part_of_a_pass(demos: Path, tmp_path: Path) -> None:
    """Any number of minibatches a step trains on the same minibatches in the same order, and a checkpoint within a pass
    continues bit for bit."""
    passes = start(demos)  # twice four minibatches of 32 of 120 steps
    passes.imitate(1, 0.0)
    parts = start(demos, "algorithm.minibatches_per_step=3")
    assert [parts.imitate(step, 0.0)["samples"] for step in (1, 2)] == [96, 24 + 64]
    assert (parts.passes, parts.pass_rows) == (1, 64)
    parts.save(str(tmp_path))
    resumed = start(demos, "algorithm.minibatches_per_step=2", "demos.memory_mb=1")
    resumed.load(str(tmp_path))
    assert resumed.imitate(3, 0.0)["samples"] == 32 + 24 and (resumed.passes, resumed.pass_rows) == (2, 0)
    for name, tensor in weights(passes).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_a_checkpoint_within_a_pass_belongs_to_its_demonstrations(demos: Path, tmp_path: Path) -> None:
    words = "algorithm.minibatches_per_step=3"
    actor = start(demos, words)
    actor.imitate(1, 0.0)
    actor.save(str(tmp_path))
    other = start(demos, words, "demos.limit=4")
    with pytest.raises(
        ConfigError, match=r"demos\.path has 96 steps now, and .* was written after 96 of 120 steps of a pass"
    ):
        other.load(str(tmp_path))


def test_a_checkpoint_of_an_earlier_version_continues(demos: Path, tmp_path: Path) -> None:
    """It has no position: such checkpoints were written between passes."""
    actor = start(demos)
    actor.imitate(1, 0.0)
    actor.save(str(tmp_path))
    file = tmp_path / FILE.format(rank=0)
    state = load_state(file)
    assert {"passes", "pass_rows", "rows"} < state.keys()
    save_state(file, {key: value for key, value in state.items() if key not in ("passes", "pass_rows", "rows")})
    expected = actor.imitate(2, 0.5)
    resumed = start(demos)
    resumed.load(str(tmp_path))
    assert (resumed.passes, resumed.pass_rows, resumed.total) == (2, 0, EPISODES * LENGTH)
    assert resumed.imitate(2, 0.5) == expected


def test_the_learning_rate_is_lowered_over_the_run(demos: Path) -> None:
    assert start(demos, "algorithm.anneal_lr=true").imitate(1, 0.75)["lr"] == pytest.approx(0.0025)
    assert start(demos).imitate(1, 0.75)["lr"] == pytest.approx(0.01)


def test_a_schedule_counts_optimizer_steps_and_a_resumed_run_goes_on_in_it(demos: Path, tmp_path: Path) -> None:
    """Two steps of three minibatches each: a warm-up of two, and a cosine that ends after five."""
    words = (
        "algorithm.minibatches_per_step=3", "actor.global_batch_size=8", "runner.max_steps=2", "actor.optim.lr_warmup_steps=2",
        "actor.optim.lr_scheduler=cosine", "actor.optim.lr_decay_steps=5", "actor.optim.min_lr=0.001",
    )  # fmt: skip

    def rates(actor: BcActor, step: int) -> list[float]:
        seen: list[float] = []
        update = actor._update
        actor._update = lambda rows, batches, rate: (seen.append(rate), update(rows, batches, rate))[1]  # type: ignore[method-assign]
        actor.imitate(step, (step - 1) / 2)
        actor._update = update  # type: ignore[method-assign]
        return seen

    actor = start(demos, *words)
    first = rates(actor, 1)
    assert first == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    actor.save(str(tmp_path))
    resumed = start(demos, *words)
    resumed.load(str(tmp_path))
    expected = [0.001 + 0.009 * 0.5 * (1 + math.cos(math.pi * share)) for share in (1 / 3, 2 / 3, 1)]
    assert rates(resumed, 2) == rates(actor, 2) == pytest.approx(expected)


def test_episodes_that_are_not_finite_are_left_out_or_refused(tmp_path: Path) -> None:
    write_demos(tmp_path / "demos.h5", spoiled=2)
    facts = BcActor(config(tmp_path / "demos.h5", "runner.on_nonfinite=skip")).init_worker()
    assert (facts["episodes"], facts["left_out"], facts["transitions"]) == (EPISODES - 1, 1, (EPISODES - 1) * LENGTH)
    with pytest.raises(ConfigError, match=r"demos\.h5"):
        BcActor(config(tmp_path / "demos.h5")).init_worker()


def spoil_row(actor: BcActor, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The action of a row is read as not finite."""
    read = actor.stream.read

    def read_spoiled(rows: np.ndarray) -> dict[str, Any]:
        batch = read(rows)
        batch["actions"][np.asarray(rows) == row] = np.nan
        return batch

    monkeypatch.setattr(actor.stream, "read", read_spoiled)


def test_a_gradient_that_is_not_finite_changes_no_weight(demos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = start(demos, "runner.on_nonfinite=skip", "algorithm.update_epochs=1", "actor.global_batch_size=120")
    spoil_row(actor, 7, monkeypatch)
    before = weights(actor)
    metrics = actor.imitate(1, 0.0)
    assert metrics["updates"] == 0 and all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())
    strict = start(demos, "algorithm.update_epochs=1")
    spoil_row(strict, 7, monkeypatch)
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


def test_recorded_passes_train_as_others_do(demos: Path) -> None:
    """`actor.capture_graphs`, on a stand-in that records a pass and replays it: rows are read before a pass begins."""
    changes = ("algorithm.bc_value_coef=1", "actor.micro_batch_size=16")
    eager, captured = start(demos, *changes), start(demos, *changes)
    backend: Any = captured.backend
    recordings = list[object]()

    def counted(compute: Any) -> Any:
        recordings.append(compute)
        return record(compute)

    backend._captured_passes = CapturedPasses(backend._changed_by_passes, counted)
    for step in (1, 2):
        assert captured.imitate(step, 0.0) == eager.imitate(step, 0.0)
    assert all(torch.equal(tensor, weights(eager)[name]) for name, tensor in weights(captured).items())
    assert len(recordings) == 3, "16 of 32 rows, and 16 and 8 of the last 24"


def measure_peak(dataset: Path, memory_mb: int, num_warm_rows: int, limit: int | None = None) -> dict[str, float]:
    """Trains in a process of its own; returns its number of frames and its peak of resident memory in MiB."""
    arm = {"memory_mb": memory_mb, "warm": num_warm_rows, "limit": limit}
    command = [sys.executable, "-m", "bench.streaming", "--folder", str(dataset), "--minibatches", "2"]
    done = subprocess.run([*command, "--arm", json.dumps(arm)], cwd=streaming.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_memory_of_a_rank_does_not_grow_with_the_demonstrations(tmp_path: Path) -> None:
    """One episode, and five with 400 MB more of pictures, read within the same budget."""
    length, size = 250, streaming.SIZE
    with TrajectoryWriter(tmp_path / "set.h5", env_id="TwoCameras-v0") as writer:
        for number in range(5):
            writer.add({
                "obs": {"state": np.zeros((length + 1, 8), np.float32),
                        "rgb": np.full((length + 1, size, size, 6), number, np.uint8)},
                "actions": np.zeros((length, 7), np.float32), "terminations": np.zeros(length, bool),
                "truncations": np.arange(length) == length - 1,
            })  # fmt: skip
    one, five = (measure_peak(tmp_path / "set.h5", 64, 4 * length, limit) for limit in (1, None))
    assert (one["frames"], five["frames"]) == (length, 5 * length)
    assert five["peak"] < one["peak"] + 60


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_50_000_frames_of_two_cameras_train_within_2_gb(tmp_path: Path) -> None:
    """A LeRobot dataset with videos of 256 × 256 pixels, which would take 20 GB in memory, in the default budget."""
    need_extra("embodied")
    streaming.write_dataset(tmp_path / "set", 50_000)
    default_budget = config(tmp_path).demos.memory_mb
    result = measure_peak(tmp_path / "set", default_budget, 1800)
    assert result["frames"] == 50_000 and result["peak"] * 2**20 < 2e9
