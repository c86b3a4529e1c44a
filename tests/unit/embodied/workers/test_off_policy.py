"""Off-policy actor: transitions of failed simulators are left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlhpc.embodied.data.batches import DropReason, RolloutBatch
from rlhpc.embodied.data.mixture import INTERVENED
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import Outcomes
from rlhpc.embodied.workers.off_policy import IncompleteRows, OffPolicyActor, OffPolicyRolloutWorker
from tests.unit.embodied.workers.failing import SIZE, STEPS, delivered, rollout


def test_off_policy_buffers_get_the_transitions_that_did_not_fail() -> None:
    rng, kept, expected = np.random.default_rng(3), list[float](), list[float]()
    actor: Any = object.__new__(OffPolicyActor)
    actor.slots, actor.world_size, actor.transitions = SlotMap(SIZE), 1, 0
    actor.positions = None
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
    worker.cfg = SimpleNamespace(algorithm=SimpleNamespace(n_step=1))
    zeros = np.zeros((2, 1, 1), np.float32)
    worker.buffers = [SimpleNamespace(columns=lambda: {"obs": zeros, "actions": zeros})]
    outcomes = Outcomes(range(2), 1, report_nonfinite=lambda *_: None)
    final = np.ones((2, 1), np.float32)
    outcomes.add(
        0, np.ones(2), np.array([True, False]), np.zeros(2, bool), {"lost": np.array([True, False]), "final_obs": final}
    )
    (batch,) = worker.transitions([outcomes.part(slice(0, 2), final)])
    assert batch.env_failed.tolist() == [[True], [False]]
    assert batch.rewards.tolist() == [[0], [1]] and not batch.terminations.any()


def led_rollout(num_slots: int = 2, steps: int = 3) -> Outcomes:
    """Outcomes in which a person led in slot 1 at steps 0 and 2, with chunks of two actions."""
    outcomes = Outcomes(range(num_slots), steps, interventions=True, action_shape=(2, 1))
    for t in range(steps):
        intervened = np.zeros((num_slots, 2), bool)
        intervened[1, 1] = t != 1
        infos = {"intervened": intervened, "executed_actions": np.full((num_slots, 2, 1), 10.0 + t)}
        done = np.zeros(num_slots, bool)
        outcomes.add(t, np.full(num_slots, float(t), np.float32), done, done, infos)
    return outcomes


def test_transitions_have_the_actions_that_were_executed() -> None:
    worker: Any = object.__new__(OffPolicyRolloutWorker)
    worker.cfg = SimpleNamespace(algorithm=SimpleNamespace(n_step=1))
    obs, actions = np.zeros((2, 3, 1), np.float32), np.ones((2, 3, 2, 1), np.float32)
    worker.buffers = [SimpleNamespace(columns=lambda: {"obs": obs, "actions": actions})]
    (batch,) = worker.transitions([led_rollout().part(slice(0, 2), obs[:, 0])])
    assert batch.actions[..., 0].tolist() == [[[1, 1]] * 3, [[10, 10], [1, 1], [12, 12]]]
    assert batch.intervened.tolist() == [[False] * 3, [True, False, True]]
    assert "executed_actions" not in batch.columns()
    assert RolloutBatch.from_columns(batch.columns()).intervened is not None
    assert INTERVENED not in batch.transition_columns()


def test_led_transitions_go_to_both_buffers_with_labels() -> None:
    def received(has_labels: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        actor: Any = object.__new__(OffPolicyActor)
        actor.slots, actor.world_size, actor.transitions, actor.positions = SlotMap(2), 1, 0, None
        actor.incomplete, actor.has_labels = IncompleteRows(2, range(2)), has_labels
        columns = {
            "obs": np.arange(6.0).reshape(2, 3, 1), "actions": np.zeros((2, 3, 2, 1), np.float32),
            **led_rollout().part(slice(0, 2), np.zeros((2, 1))).transition_columns(),
        }  # fmt: skip
        actor.receiver = SimpleNamespace(
            share=range(2), receive=lambda *_: replace(RolloutBatch.from_columns(columns), version=1)
        )
        replay: dict[str, Any] = {}
        demos: dict[str, Any] = {}
        actor.replay, actor.interventions = SimpleNamespace(add=replay.update), SimpleNamespace(add=demos.update)
        actor.receive(1, None)
        return replay, demos

    replay, demos = received(has_labels=True)
    assert replay["obs"].shape == (2, 3, 1) and replay[INTERVENED].tolist() == [[False] * 3, [True, False, True]]
    assert demos["obs"].ravel().tolist() == [3, 5] and demos[INTERVENED].all() and demos["obs"].shape == (1, 2, 1)
    replay, demos = received(has_labels=False)  # as in a run that was resumed with a new source of interventions
    assert INTERVENED not in replay and INTERVENED not in demos and demos["obs"].ravel().tolist() == [3, 5]


def test_marks_reach_the_classifier_whose_rewards_the_buffers_get() -> None:
    outcomes = Outcomes(range(1), 3, interventions=True, action_shape=(1, 1), marks=True)
    for t, mark in enumerate((0, 1, -1)):
        infos = {
            "intervened": np.ones((1, 1), bool),
            "executed_actions": np.zeros((1, 1, 1)),
            "marks": np.array([mark]),
        }
        done = np.array([mark != 0])
        infos |= {"final_obs": np.full((1, 1), t + 10.0, np.float32)}
        outcomes.add(t, np.array([5.0], np.float32), done, np.zeros(1, bool), infos)
    worker: Any = object.__new__(OffPolicyRolloutWorker)
    worker.cfg = SimpleNamespace(algorithm=SimpleNamespace(n_step=1))
    obs = np.arange(3, dtype=np.float32).reshape(1, 3, 1)
    worker.buffers = [SimpleNamespace(columns=lambda: {"obs": obs, "actions": np.zeros((1, 3, 1, 1), np.float32)})]
    (batch,) = worker.transitions([outcomes.part(slice(0, 1), np.full((1, 1), 3, np.float32))])
    actor: Any = object.__new__(OffPolicyActor)
    actor.slots, actor.world_size, actor.transitions, actor.positions = SlotMap(1), 1, 0, None
    actor.incomplete, actor.has_labels = IncompleteRows(1, range(1)), True
    received: list[Any] = []

    def receive(columns: Any, marks: np.ndarray) -> np.ndarray:
        received.append((columns["next_obs"].ravel().tolist(), marks.tolist()))
        return columns["rewards"] + 2

    actor.classifier = SimpleNamespace(receive=receive)
    replay: dict[str, Any] = {}
    demos: dict[str, Any] = {}
    actor.replay, actor.interventions = SimpleNamespace(add=replay.update), SimpleNamespace(add=demos.update)
    delivered_batch = replace(RolloutBatch.from_columns(batch.columns()), version=1)
    actor.receiver = SimpleNamespace(share=range(1), receive=lambda *_: delivered_batch)
    actor.receive(1, None)
    assert received == [([1.0, 11.0, 12.0], [[0, 1, -1]])], "the last observations of the marked episodes"
    assert replay["rewards"].tolist() == demos["rewards"].tolist() == [[7, 7, 7]]
    assert "marks" not in replay and "marks" not in demos
