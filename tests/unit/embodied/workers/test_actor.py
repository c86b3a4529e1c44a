"""What actors take in of steps whose rollout ranks have gone."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np

from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.rollout.slot_map import PlayedRollout, SlotMap, Source
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.embodied.workers.actor import TrajectoryReceiver
from rlhpc.runtime.errors import DeadlineExceeded


class Sent(defaultdict[str, deque[dict[str, Any]]]):
    """What has been sent, by key."""

    def __init__(self) -> None:
        super().__init__(deque)

    def get(self, key: str, timeout: float = 0.0) -> dict[str, Any]:  # type: ignore[override]
        if not self[key]:
            raise DeadlineExceeded(key)
        return self[key].popleft()


SLOTS = SlotMap(4, num_rollout_ranks=2, acting=(0, 1))


def transitions(slots: int, decisions: int) -> dict[str, np.ndarray]:
    """Columns of transitions besides those that a test is about."""
    shape = (slots, decisions)
    return {"actions": np.zeros((*shape, 1)), "terminations": np.zeros(shape, bool), "nonfinite": np.zeros(shape, bool)}


def sent(*full_rollouts: tuple[int, int], decisions: int = 3, needs_lags: bool = False) -> tuple[Any, Sent]:
    """An receiver, and what it is sent by ranks of turns."""
    box = Sent()
    for rank, number in full_rollouts:
        columns = {
            **transitions(2, decisions),
            "rewards": np.full((2, decisions), number, np.float32),
            "obs": np.full((2, decisions, 5), number, np.uint8),
        }
        box[SLOTS.to_actor_key(0, rank, 0)].append({**columns, "version": number - 1, "rollout": number})
    receiver: Any = TrajectoryReceiver(SacConfig(), SLOTS, 0, needs_lags=needs_lags)
    receiver.connect(box, box)
    return receiver, box


def source(numbers: tuple[int, ...], later: set[int], decisions: int = 3, **more: Any) -> Source:
    both = frozenset({0, 1})
    acted = (PlayedRollout(FullRollout(number, number, 0, decisions), SLOTS, both) for number in numbers)
    return Source(SLOTS, tuple(acted), frozenset(later), **more)


def test_what_a_rank_brought_counts_for_its_step_alone() -> None:
    """It has sent one step, and ended in the next; started again, under the same number, it has sent the one after that. What
    it had begun comes too late."""
    receiver, box = sent((0, 7), (1, 7), (0, 8), (1, 7), (0, 9), (1, 9))
    found = receiver.receive(7, source((7,), {8, 9}))
    assert found.version == 6 and (found.rewards == 7).all() and found.missing is None
    found = receiver.receive(8, source((8,), {9}))
    assert found.version == 7 and found.missing.tolist() == [[False] * 3] * 2 + [[True] * 3] * 2
    assert (found.rewards[:2] == 8).all() and not found.rewards[2:].any() and found.obs.dtype == np.uint8
    found = receiver.receive(9, source((9,), set()))
    assert found.version == 8 and (found.rewards == 9).all() and found.missing is None
    assert not any(box.values())


def test_transitions_know_how_old_the_weights_are_that_acted() -> None:
    """Turns and shards of a step may be of different ages; what is missing has no age."""
    receiver, box = sent((0, 4), (1, 4), (0, 6), decisions=2, needs_lags=True)
    shard = {**transitions(4, 2), "rewards": np.zeros((4, 2)), "obs": np.zeros((4, 2, 5), np.uint8)}
    for key, version in ((4, 3), (5, 5)):
        box[SLOTS.shard_key(key, 0)].append({**shard, "version": version})
    found = receiver.receive(6, source((4, 6), set(), 2, units=[[4, 5]]))
    old, new, shards = [2.0, 2.0], [0.0, 0.0], [2.0, 2.0, 0.0, 0.0]
    assert found.lags.tolist() == [[*old, *new, *shards]] * 4 and found.version == 3
    assert found.missing[:, 2:4].tolist() == [[False] * 2] * 2 + [[True] * 2] * 2


def test_a_step_is_what_rollouts_and_parts_bring_one_after_the_other() -> None:
    """Of two steps that were shared, helpers have gone from one, so its rest is a full rollout that comes after
    the other step's; one rank has not sent its first full rollout."""
    receiver, box = sent((0, 1), (1, 2), (0, 2), (0, 3), (1, 3), decisions=2)
    box[SLOTS.shard_key(4, 0)].append(
        {**transitions(4, 2), "rewards": np.full((4, 2), 9.0), "obs": np.zeros((4, 2, 5), np.uint8), "version": 1}
    )
    found = receiver.receive(1, source((1, 3), {2}, 2))
    assert found.rewards.tolist() == [[1, 1, 3, 3]] * 2 + [[0, 0, 3, 3]] * 2 and found.obs.shape == (4, 4, 5)
    assert found.missing.tolist() == [[False] * 4] * 2 + [[True, True, False, False]] * 2
    found = receiver.receive(2, source((2,), set(), 2, units=[[4]]))
    assert found.rewards.tolist() == [[2, 2, 9, 9]] * 4 and found.version == 1 and found.missing is None
    assert not any(box.values())
