"""Off-policy actor: transitions of failed simulators are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhpc.embodied.data.batches import DropReason
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import Outcomes
from rlhpc.embodied.workers.off_policy import IncompleteRows, OffPolicyActor, OffPolicyRolloutWorker
from tests.unit.embodied.workers.failing import SIZE, STEPS, delivered, rollout


def test_off_policy_buffers_get_the_transitions_that_did_not_fail() -> None:
    rng, kept, expected = np.random.default_rng(3), list[float](), list[float]()
    actor: Any = object.__new__(OffPolicyActor)
    actor.slots, actor.world_size, actor.transitions = SlotMap(SIZE), 1, 0
    actor.incomplete = IncompleteRows(SIZE, range(SIZE))
    for step in range(1, 6):
        columns = rollout(rng, whole=False, chunk=1, per_action=False)
        columns["obs"] = np.arange(SIZE * STEPS).reshape(SIZE, STEPS, 1) + 1000.0 * step
        expected += columns["obs"][~columns["env_failed"]].ravel().tolist()
        receiver = SimpleNamespace(share=range(SIZE), receive=lambda *_, c=columns: delivered(c))
        actor.receiver, actor.replay = receiver, SimpleNamespace(add=lambda c: kept.extend(c["obs"].ravel().tolist()))
        counts = actor.receive(step, None)
        assert counts.dropped == {DropReason.ENV_FAILED: columns["env_failed"].sum()}
    assert len({*kept}) == len(kept) == actor.transitions and {*kept} <= {*expected}
    assert len(expected) - len(kept) < SIZE, "less than a row waits"


def test_rollout_ranks_hand_over_what_failed() -> None:
    worker: Any = object.__new__(OffPolicyRolloutWorker)
    zeros = np.zeros((2, 1, 1), np.float32)
    worker.buffers = [SimpleNamespace(columns=lambda: {"obs": zeros, "actions": zeros})]
    outcomes = Outcomes(range(2), 1, spoiled=lambda *_: None)
    final = np.ones((2, 1), np.float32)
    outcomes.add(
        0, np.ones(2), np.array([True, False]), np.zeros(2, bool), {"lost": np.array([True, False]), "final_obs": final}
    )
    (batch,) = worker.transitions([outcomes.part(slice(0, 2), final)])
    assert batch.env_failed.tolist() == [[True], [False]]
    assert batch.rewards.tolist() == [[0], [1]] and not batch.terminations.any()
