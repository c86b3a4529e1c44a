"""Actor that simulates and acts: what it drops, what it saves, and updates that are recorded and replayed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.algorithms.nonfinite import NonFinite
from rlhpc.config.typed import typed
from rlhpc.embodied.config import PpoConfig, SacConfig
from rlhpc.embodied.data.batches import DropReason
from rlhpc.embodied.data.mixture import INTERVENED
from rlhpc.embodied.envs.tensor_env import TensorEnv
from rlhpc.embodied.envs.tensor_tasks import CartPole, Pendulum
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import next_values
from rlhpc.embodied.workers.tensor_actor import OffPolicyTensorActor, PpoTensorRollout, TensorActor, _next_values
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.captured_passes import CapturedPasses
from tests.unit.training.test_captured_passes import record

CONFIG = Path(__file__).resolve().parents[4] / "configs/embodied/cartpole_tensors.yaml"
SLOTS, STEPS = 6, 10


class Spoiled(CartPole):
    """One quantity of slot 4 is not finite, in its fourth step since the start."""

    def __init__(self, num_envs: int, device: torch.device, quantity: str) -> None:
        super().__init__(num_envs, device)
        self.quantity, self.steps = quantity, 0

    def step(self, actions: torch.Tensor) -> Any:
        self.steps += 1
        obs, rewards, *rest = super().step(actions)
        if self.steps == 4:
            if self.quantity == "observation":
                obs = obs.clone()
                obs[4, 1] = torch.inf
            else:
                rewards = rewards.clone()
                rewards[4] = torch.nan
        return obs, rewards, *rest

    def reset(self, mask: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return super().reset(mask, seeds)


class Forgetful(CartPole):
    state_dict = TensorEnv.state_dict


def actor(*overrides: str) -> TensorActor:
    words = [
        f"env.train.num_envs={SLOTS}", f"algorithm.rollout_steps={STEPS}", "actor.global_batch_size=30",
        "env.train.max_episode_steps=7", *overrides,
    ]  # fmt: skip
    cfg: Any = typed(PpoConfig, load_config(CONFIG, words, check=False))
    worker = TensorActor(cfg)
    worker.build(SlotMap(SLOTS))
    return worker


def step_of(worker: Any, step: int, **options: int) -> Any:
    """Plays and trains a step, and reads its results."""
    worker.play(step, **options)
    worker.train(step)
    return worker.read_step()


def test_transitions_are_those_of_the_environment() -> None:
    worker = actor()
    worker.play(1)
    batch = worker.batch
    worker.train(1)
    counts, report, _ = worker.read_step()
    assert batch is not None and len(batch) == counts.num_received == SLOTS * STEPS and counts.version == 0
    obs, rewards = batch.obs.reshape(SLOTS, STEPS, 4), batch.returns
    starts = obs[:, 0].abs().max(1).values <= 0.05
    assert starts.all() and not torch.equal(obs[0, 0], obs[1, 0])
    moved = obs[:, 0, 0] + 0.02 * obs[:, 0, 1]
    torch.testing.assert_close(obs[:, 1, 0], moved)
    assert report["length"].tolist() == report["return"].tolist() and set(report["step"].tolist()) >= {6.0}
    assert (obs[report["slot"][0].astype(int), 7].abs() <= 0.05).all()  # the next episode has begun
    assert rewards.isfinite().all() and batch.mask.all()


@pytest.mark.parametrize("quantity", ["reward", "observation"])
def test_what_is_not_finite_ends_the_run_or_is_dropped_with_its_slot(quantity: str) -> None:
    words = (f"env.train.env_id={__name__}:Spoiled", f"env.train.kwargs.quantity={quantity}")
    worker = actor(*words)
    with pytest.raises(NonFinite, match=r"step 1, decision 3: .* of slot 4 of .*Spoiled \(actor-0\) is not finite"):
        step_of(worker, 1)
    worker = actor(*words, "runner.on_nonfinite=skip")
    worker.play(1)
    batch = worker.batch
    worker.train(1)
    counts, _, metrics = worker.read_step()
    assert batch is not None and counts.dropped[DropReason.NONFINITE] == STEPS
    mask = batch.mask.reshape(SLOTS, STEPS)
    assert not mask[4].any() and mask[[0, 1, 2, 3, 5]].all()
    assert all(tensor.isfinite().all() for tensor in batch.tensors())
    assert metrics["grad_norm"] > 0
    worker.play(2)
    assert worker.batch is not None and worker.batch.mask.all()
    worker.train(2)
    assert not worker.read_step()[0].dropped


@pytest.mark.parametrize(
    "words",
    [(), ("env.train.env_id=pendulum", "actor.model.num_action_chunks=2", "algorithm.logprob_type=action_level",
          "algorithm.reward_type=action_level", "actor.model.value_per_action=true", "env.train.max_episode_steps=5")],
    ids=["decisions", "actions"],
)  # fmt: skip
def test_transitions_need_no_number_of_ended_episodes(words: tuple[str, ...]) -> None:
    """As on an accelerator, where values are computed for as many last observations as there are decisions."""
    counting, others = actor(*words), actor(*words)
    assert isinstance(others.rollout, PpoTensorRollout)
    others.rollout.counts_ends = False
    for step in (1, 2, 3):
        rollouts = []
        for worker in (counting, others):
            worker.play(step)
            assert worker._results is not None
            rollouts.append(worker._results)
        columns = [rollout.batch.columns() for rollout in rollouts]
        assert all(torch.equal(columns[0][name], column) for name, column in columns[1].items())
        ended, values = rollouts[0].statistics["ended"], columns[0]["values"]
        assert ended.any() and not ended.all()
        following = columns[0]["next_values"]
        if not words:
            goes_on = ~ended[:, :-1]
            assert torch.equal(following[:, :-1][goes_on], values[:, 1:][goes_on])
            assert not torch.equal(following[:, :-1][ended[:, :-1]], values[:, 1:][ended[:, :-1]])
        for worker in (counting, others):
            worker.train(step)
            worker.read_step()


@pytest.mark.parametrize("chunk", [(), (3,)], ids=["decisions", "actions"])
def test_next_values_by_mask_are_those_by_index(chunk: tuple[int, ...]) -> None:
    """Also of episodes that end within a chunk."""
    generator = torch.Generator().manual_seed(0)
    values, end_values = (torch.randn(4, 6, *chunk, generator=generator) for _ in range(2))
    last_values, has_ended = torch.randn(4, *chunk, generator=generator), torch.rand(4, 6, generator=generator) < 0.4
    is_executed = None
    if chunk:
        lengths = torch.randint(1, 4, (4, 6), generator=generator)
        is_executed = torch.arange(3) < torch.where(has_ended, lengths, 3)[..., None]
    slots, steps = has_ended.nonzero(as_tuple=True)
    expected = next_values(values, last_values, slots, steps, end_values[slots, steps], is_executed)
    assert torch.equal(_next_values(values, last_values, has_ended, end_values, is_executed), expected)


def test_a_checkpoint_continues_the_episodes(tmp_path: Path) -> None:
    worker, restored = actor(), actor()
    for step in (1, 2):
        worker.play(step)
        worker.update(step)
    worker.save(str(tmp_path))
    restored.load(str(tmp_path))
    assert restored.has_restored_episodes()
    for each in (worker, restored):
        each.play(3)
    assert worker.batch is not None and restored.batch is not None
    for mine, other in zip(restored.batch.tensors(), worker.batch.tensors(), strict=True):
        assert torch.equal(mine, other)


def test_an_environment_without_a_state_starts_its_episodes_over(tmp_path: Path) -> None:
    words = (f"env.train.env_id={__name__}:Forgetful",)
    worker, restored = actor(*words), actor(*words)
    worker.play(1)
    worker.save(str(tmp_path))
    restored.load(str(tmp_path))
    assert not restored.has_restored_episodes()
    restored.play(2)
    assert restored.batch is not None and (restored.batch.obs.reshape(SLOTS, STEPS, 4)[:, 0].abs() <= 0.05).all()


def test_recorded_passes_train_the_same() -> None:
    """`actor.capture_graphs`, on a stand-in that records a pass and replays it."""
    eager, captured = actor(), actor()
    backend: Any = captured.backend
    backend._captured_passes = CapturedPasses(backend._changed_by_passes, record)
    for step in (1, 2, 3):
        metrics = []
        for worker in (eager, captured):
            worker.play(step)
            metrics.append(worker.update(step))
        assert {**metrics[0], "update_s": 0} == {**metrics[1], "update_s": 0}
    weights = captured.policy.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in eager.policy.state_dict().items())


def test_an_evaluation_counts_each_slots_share() -> None:
    worker = actor("env.eval.num_envs=4", "env.eval.num_episodes=6", "env.eval.max_episode_steps=5")
    rows = [worker.evaluate(part, 2) for part in range(2)]
    assert [len(part or ()) for part in rows] == [4, 2] and all(
        row["length"] == 5 for part in rows for row in part or ()
    )


SAC_CONFIG = Path(__file__).resolve().parents[4] / "configs/embodied/pendulum_sac_tensors.yaml"
SAC_SLOTS, SAC_STEPS = 5, 8
ALGORITHMS = ("sac", "td3", "crossq")


class SpoiledPendulum(Pendulum):
    """The reward of slot 3 is not finite in its second step since the start."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__(num_envs, device)
        self.steps = 0

    def step(self, actions: torch.Tensor) -> Any:
        self.steps += 1
        obs, rewards, *rest = super().step(actions)
        if self.steps == 2:
            rewards = rewards.clone()
            rewards[3] = torch.nan
        return obs, rewards, *rest


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds an actor of one rank; files of the replay buffer are in the test's folder."""
    service = SimpleNamespace(scratch=SimpleNamespace(spill=tmp_path / "ring"))
    monkeypatch.setattr("rlhpc.embodied.workers.off_policy.current", lambda: SimpleNamespace(service=service))

    def build(algorithm: str = "sac", *overrides: str) -> OffPolicyTensorActor:
        words = [
            f"env.train.num_envs={SAC_SLOTS}", f"algorithm.rollout_steps={SAC_STEPS}", "env.train.max_episode_steps=6",
            f"algorithm.name={algorithm}", f"actor.model.model_type={algorithm}", "actor.model.hidden_sizes=[16,16]",
            "actor.model.critic_hidden_sizes=[16,16]", "actor.global_batch_size=16", "algorithm.update_to_data=0.1",
            "algorithm.replay_buffer={size: 200, min_buffer_size: 0}", *overrides,
        ]  # fmt: skip
        cfg: Any = typed(SacConfig, load_config(SAC_CONFIG, words, check=False))
        worker = OffPolicyTensorActor(cfg)
        worker.build(SlotMap(SAC_SLOTS))
        return worker

    return build


def columns_of_buffer(worker: OffPolicyTensorActor) -> dict[str, torch.Tensor]:
    """The buffer's transitions, `[decisions, slots, ...]`."""
    columns = worker.replay.columns(torch.arange(worker.replay.held * SAC_SLOTS))
    return {name: column.unflatten(0, (-1, SAC_SLOTS)) for name, column in columns.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_buffer_has_the_transitions_of_the_environment(make: Any, algorithm: str) -> None:
    worker = make(algorithm, "algorithm.n_step=2")
    worker.play(1, random_steps=2 * SAC_SLOTS)
    before = {name: tensor.clone() for name, tensor in worker.acting_policy.state_dict().items()}
    worker.train(1)
    counts, report, metrics = worker.read_step()
    assert (
        counts.num_received == SAC_SLOTS * SAC_STEPS
        and counts.version == 0
        and report["length"].tolist() == [6.0] * SAC_SLOTS
    )
    columns = columns_of_buffer(worker)
    obs, next_obs, actions = columns["obs"], columns["next_obs"], columns["actions"]
    has_followed = [t for t in range(SAC_STEPS - 1) if t != 5]  # an episode ends after decision 5
    assert torch.equal(next_obs[has_followed], obs[[t + 1 for t in has_followed]])
    assert not torch.equal(next_obs[5], obs[6]) and not columns["terminations"].any()
    assert (columns["position"] & 1 == 1).nonzero()[:, 0].tolist() == [5] * SAC_SLOTS
    assert actions.abs().max() <= 2 and actions[:2].std() > 0.5
    assert metrics["updates"] == 4 and metrics["buffer_size"] == SAC_SLOTS * SAC_STEPS
    worker.play(2)
    trained = dict(worker.policy.acting_weights())
    acting = worker.acting_policy.state_dict()
    assert all(torch.equal(acting[name], tensor) for name, tensor in trained.items())
    assert any(not torch.equal(before[name], acting[name]) for name in trained)


def test_what_is_not_finite_ends_the_run_or_is_left_out(make: Any) -> None:
    words = ("algorithm.n_step=2", f"env.train.env_id={__name__}:SpoiledPendulum")
    with pytest.raises(
        NonFinite, match=r"step 1, decision 1: .* of slot 3 of .*SpoiledPendulum \(actor-0\) is not finite"
    ):
        step_of(make("sac", *words), 1)
    worker = make("sac", *words, "runner.on_nonfinite=skip")
    counts, _, _ = step_of(worker, 1)
    assert counts.dropped[DropReason.NONFINITE] == 1 and counts.num_received == SAC_SLOTS * (SAC_STEPS - 1)
    assert len(worker.replay) == SAC_SLOTS * (SAC_STEPS - 1)
    counts, _, metrics = step_of(worker, 2)
    assert not counts.dropped and metrics["updates"] == 7
    assert all(column.isfinite().all() for column in columns_of_buffer(worker).values() if column.is_floating_point())


def test_a_checkpoint_continues_episodes_buffer_and_updates(make: Any, tmp_path: Path) -> None:
    worker, restored = make("crossq", "algorithm.n_step=3"), make("crossq", "algorithm.n_step=3")
    for step in (1, 2):
        worker.play(step)
        worker.update(step)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    worker.save(str(folder))
    restored.load(str(folder))
    assert restored.has_restored_episodes()
    metrics = []
    for each in (worker, restored):
        each.play(3)
        metrics.append({**each.update(3), "update_s": 0})
    assert metrics[0] == metrics[1]
    mine, other = columns_of_buffer(restored), columns_of_buffer(worker)
    assert all(torch.equal(mine[name], column) for name, column in other.items())


def test_transitions_with_labels_of_interventions_are_refused(make: Any, tmp_path: Path) -> None:
    """As in a checkpoint of a run with a source of interventions, whose simulators were on the host."""
    played, labelled = make(), make()
    played.play(1)
    columns = {name: column.transpose(0, 1) for name, column in columns_of_buffer(played).items()}
    labelled.replay.add({**columns, INTERVENED: torch.zeros(SAC_SLOTS, SAC_STEPS, dtype=torch.bool)})
    folder = tmp_path / "global_step_1"
    folder.mkdir()
    labelled.save(str(folder))
    with pytest.raises(ConfigError, match="labels of interventions; continue the run with separate ranks"):
        make().load(str(folder))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_recorded_passes_train_the_same_off_policy(make: Any, algorithm: str) -> None:
    """`actor.capture_graphs`, on a stand-in that records a pass and replays it."""
    eager, captured = make(algorithm), make(algorithm)
    captured.off_policy.capture_passes(record)
    assert isinstance(captured.off_policy._captured_passes, CapturedPasses)
    for step in (1, 2, 3):
        metrics = []
        for worker in (eager, captured):
            worker.play(step)
            metrics.append({**worker.update(step), "update_s": 0})
        assert metrics[0] == metrics[1]
    weights = captured.policy.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in eager.policy.state_dict().items())
