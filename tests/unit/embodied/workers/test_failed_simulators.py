"""Simulators that fail at random: what is trained, counted and recorded is the data without their transitions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.embodied.config import EvalEnvConfig, PpoConfig
from rlhpc.embodied.data.batches import DropReason, RolloutCounts, TrainBatch
from rlhpc.embodied.data.recording import Recording
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.evaluation.episodes import play
from rlhpc.embodied.evaluation.recorder import InterventionRecorder
from rlhpc.embodied.interventions.intervention_env import InterventionEnv
from rlhpc.embodied.interventions.sources import Intervention
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import EpisodeLog
from rlhpc.embodied.workers.ppo_actor import EmbodiedActor
from rlhpc.runtime.errors import RlhpcError
from tests.unit.embodied.workers.failing import GAMMA, LAMBDA, SIZE, STEPS, Failing, Still, delivered, recorded, rollout


def trained(columns: dict[str, np.ndarray], adv_type: str, group_size: int) -> tuple[TrainBatch, RolloutCounts]:
    """Returns the batch that an actor trains on, and its counts."""
    actor: Any = object.__new__(EmbodiedActor)
    actor.cfg = PpoConfig()
    actor.cfg.algorithm.adv_type, actor.cfg.algorithm.gamma, actor.cfg.algorithm.gae_lambda = adv_type, GAMMA, LAMBDA
    actor.share, actor.device, actor.world_size = range(SIZE), torch.device("cpu"), 1
    actor.slots = SlotMap(SIZE, group_size=group_size)
    actor.receiver = SimpleNamespace(receive=lambda step, source: delivered(columns))
    result: tuple[TrainBatch, RolloutCounts] = actor._receive_part(1, None)
    return result


def gae_of(columns: dict[str, np.ndarray], slot: int) -> dict[tuple[int, int], float]:
    """Advantages of a slot's executed actions by a plain loop: of its rollout without the transitions that failed, before
    each of which its episode is cut."""
    rows = []  # decision, action, reward, value, value at the end, terminated, done
    shape = columns["rewards"].shape
    reward, value, ahead = (
        columns[name].reshape(*shape[:2], -1)[slot] for name in ("rewards", "values", "next_values")
    )
    for t in range(STEPS):
        if columns["env_failed"][slot, t]:
            if rows:
                rows[-1][-1] = True
            continue
        count = int(columns["action_mask"][slot, t].sum()) if len(shape) == 3 else 1
        for c in range(count):
            last = c == count - 1
            ends = [bool(columns[name][slot, t]) and last for name in ("terminations", "truncations")]
            rows.append([(t, c), reward[t, c], value[t, c], ahead[t, c], ends[0], any(ends)])
    found, carried = {}, 0.0
    for at, r, v, following, terminated, done in reversed(rows):
        carried = r + GAMMA * following * (not terminated) - v + GAMMA * LAMBDA * (not done) * carried
        found[at] = carried
    return found


@pytest.mark.parametrize("per_action", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gae_is_that_of_the_rollout_without_what_failed(per_action: bool, seed: int) -> None:
    chunk = 3 if per_action else 1
    columns = rollout(np.random.default_rng(seed), whole=False, chunk=chunk, per_action=per_action)
    assert columns["env_failed"].any()
    batch, counts = trained(columns, "gae", 1)
    assert counts.dropped == {DropReason.ENV_FAILED: columns["env_failed"].sum()}
    mask, advantages = (tensor.reshape(SIZE, STEPS, -1) for tensor in (batch.mask, batch.advantages))
    for slot in range(SIZE):
        expected = gae_of(columns, slot)
        assert {tuple(at) for at in mask[slot].nonzero().tolist()} == set(expected)
        for (t, c), value in expected.items():
            assert advantages[slot, t, c] == pytest.approx(value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("adv_type", ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("per_action", [False, True])
def test_others_advantages_are_those_of_the_batch_without_the_slots_that_failed(
    adv_type: str, whole: bool, per_action: bool
) -> None:
    """Bit for bit, also of those in the same group."""
    chunk, group = (3 if per_action else 1), 4
    for seed in range(4):
        columns = rollout(np.random.default_rng(seed), whole=whole, chunk=chunk, per_action=per_action)
        counted = columns["env_failed"].any(1)
        assert counted.any() and not counted.all()
        batch, counts = trained(columns, adv_type, group)
        assert counts.dropped == {DropReason.ENV_FAILED: counted.sum() * STEPS} and not batch.mask[counted].any()
        mask = torch.from_numpy(columns.get("loss_mask", np.ones((SIZE, STEPS), bool)))
        if per_action:
            mask = torch.from_numpy(columns["action_mask"]) & mask[..., None]
        rest = torch.from_numpy(~counted)
        advantages, returns = calculate_adv_and_returns(
            adv_type, rewards=torch.from_numpy(columns["rewards"]).flatten(1)[rest], loss_mask=mask.flatten(1)[rest],
            group_ids=torch.arange(SIZE)[rest] // group, gamma=GAMMA,
        )  # fmt: skip
        assert torch.equal(batch.advantages.flatten(1)[rest], advantages)
        assert torch.equal(batch.returns.flatten(1)[rest], returns)


def test_an_evaluation_plays_an_episode_that_was_lost_again() -> None:
    rows = play(Still(), Failing({2, 3, 9}), np.array([2, 1]), torch.device("cpu"))
    assert [row["length"] for row in rows] == [4, 4, 4]


def test_an_evaluation_whose_simulators_fail_without_end_ends() -> None:
    with pytest.raises(RlhpcError, match="simulators failed"):
        play(Still(), Failing(range(0, 10**9, 2)), np.array([1, 1]), torch.device("cpu"))


def test_episodes_that_failed_count_in_no_statistic() -> None:
    log, env = EpisodeLog(), Failing({2})
    env.reset()
    for t in range(4):
        _, _, terminations, truncations, infos = env.step(np.zeros((2, 1)))
        log.add(t, 0, infos, np.flatnonzero(terminations | truncations))
    assert log.arrays()["slot"].tolist() == [1]


class Person(Intervention):
    """Acts in slot 0."""

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        return actions, np.array([True, False])


def test_of_an_intervention_the_steps_before_a_failure_are_recorded(tmp_path: Path) -> None:
    env = InterventionEnv(Failing({3}), Person(), EvalEnvConfig(), range(2), seed=0)

    def open_writer(path: Path) -> TrajectoryWriter:
        return TrajectoryWriter(path, env_id="x", env_kwargs={}, max_episode_steps=4)

    with Recording(open_writer, tmp_path / "a.h5", keeps=True) as recording:
        recorder = InterventionRecorder(recording, env, num_episodes=2)
        play(Still(), env, np.array([1, 1]), torch.device("cpu"), observer=recorder)
        assert recorder.num_played == 2 and recorder.num_intervention_steps == 6
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [2, 4]
