"""What actors take in of steps whose rollout ranks have gone."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np

from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.roles.intake import Intake
from rlhpc.embodied.roles.slots import SlotMap, Source
from rlhpc.runtime.errors import DeadlineExceeded


class Sent(defaultdict[str, deque[dict[str, Any]]]):
    """What has been sent, by key."""

    def __init__(self) -> None:
        super().__init__(deque)

    def get(self, key: str, timeout: float) -> dict[str, Any]:  # type: ignore[override]
        if not self[key]:
            raise DeadlineExceeded(key)
        return self[key].popleft()


def test_what_a_rank_brought_counts_for_its_step_alone() -> None:
    """It has sent one step, and ended in the next; started again, under the same number, it has sent the one after that. What
    it had begun comes too late."""
    slots, sent = SlotMap(4, rollout_ranks=2, acting=(0, 1)), Sent()

    def send(rank: int, step: int) -> None:
        columns = {"rewards": np.full((2, 3), step, np.float32), "obs": np.full((2, 3, 5), step, np.uint8)}
        sent[slots.to_actor_key(0, rank, 0)].append({**columns, "version": step - 1, "step": step})

    intake: Any = Intake(SacConfig(), slots, 0)
    intake.connect(sent, None)
    for rank, step in ((0, 7), (1, 7), (0, 8), (1, 7), (0, 9), (1, 9)):
        send(rank, step)
    both, later = frozenset({0, 1}), frozenset({8, 9})
    found, version = intake.columns(7, Source(slots, 7, later, both))
    assert version == 6 and (found["rewards"] == 7).all() and "lost" not in found
    found, version = intake.columns(8, Source(slots, 8, later - {8}, both))
    assert version == 7 and found["lost"].tolist() == [[False] * 3] * 2 + [[True] * 3] * 2
    assert (found["rewards"][:2] == 8).all() and not found["rewards"][2:].any() and found["obs"].dtype == np.uint8
    found, version = intake.columns(9, Source(slots, 9, frozenset(), both))
    assert version == 8 and (found["rewards"] == 9).all() and "lost" not in found
    assert not any(sent.values())
