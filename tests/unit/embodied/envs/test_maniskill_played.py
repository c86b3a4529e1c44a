"""What slots did since their resets, kept by step, is what lists for each slot would have."""

from __future__ import annotations

import numpy as np

from rlhpc.embodied.envs.maniskill import ActionLog

SLOTS, WIDTH = 5, 3


def test_it_is_what_a_list_for_each_slot_would_hold() -> None:
    drawn = np.random.default_rng(0)
    played, lists = ActionLog(SLOTS, WIDTH), [list[np.ndarray]() for _ in range(SLOTS)]
    played.begin(np.arange(SLOTS))
    for _ in range(60):
        actions = drawn.normal(size=(SLOTS, WIDTH))
        played.add(actions)
        for slot, kept in enumerate(lists):
            kept.append(actions[slot].astype(np.float32))
        actions[:] = np.nan  # whoever acts may use the array again
        ended = np.flatnonzero(drawn.random(SLOTS) < 0.2)
        played.begin(ended)
        for slot in ended.tolist():
            lists[slot] = []
        for slot, kept in enumerate(lists):
            found = played.actions_of(slot)
            assert found.dtype == np.float32 and found.shape == (len(kept), WIDTH)
            np.testing.assert_array_equal(found, np.array(kept, np.float32).reshape(-1, WIDTH))
        assert len(played._steps) == max(map(len, lists)), "steps before all resets are let go"
