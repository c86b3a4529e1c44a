"""Env worker: episodes without a deciding policy are left out."""

from __future__ import annotations

import numpy as np

from rlhpc.embodied.workers.env import EnvWorker


class Half:
    """Lanes to two rollout ranks, one of which has gone."""

    def __init__(self, *parts: np.ndarray | None) -> None:
        self.parts = list(zip((range(8, 10), range(10, 12)), parts, strict=True))

    def get(self, stage: int) -> list[tuple[range, np.ndarray | None]]:
        return self.parts


def test_episodes_in_which_nobody_acted_for_a_while_are_left_out() -> None:
    """Their slots get actions of others meanwhile; where nobody acts at all, there are none."""
    rank = object.__new__(EnvWorker)
    rank.shares, rank._mixed_slots, rank._wait_s = [range(8, 12)], [np.zeros(4, bool)], 0.0
    rank.links = Half(np.array([[[0.1]], [[0.2]]]), np.array([[[0.3]], [[0.4]]]))  # type: ignore[assignment]
    chosen = rank._receive_actions(0)
    assert chosen is not None and chosen.ravel().tolist() == [0.1, 0.2, 0.3, 0.4]
    assert rank._acted_by_policy(0, np.arange(4)).tolist() == [0, 1, 2, 3]
    rank.links = Half(None, np.array([[[0.3]], [[0.4]]]))  # type: ignore[assignment]
    chosen = rank._receive_actions(0)
    assert chosen is not None and chosen.ravel().tolist() == [0.3, 0.4, 0.3, 0.4]
    assert rank._acted_by_policy(0, np.array([0, 3])).tolist() == [3], "slot 1 is still in such an episode"
    assert rank._acted_by_policy(0, np.array([0, 1])).tolist() == [0]
    rank.links = Half(None, None)  # type: ignore[assignment]
    assert rank._receive_actions(0) is None
