"""Replay buffers on disk: other layouts read them, and damage is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhpc.embodied.data.replay_buffer import ReplayBuffer, inspect
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError
from tests.unit.embodied.data.test_replay_buffer import save
from tests.unit.embodied.data.transitions import SLOTS, batch, buffers, fill, play


def test_another_capacity_and_another_number_of_environments(tmp_path):
    paths = RunPaths(tmp_path / "run")
    found = buffers(tmp_path, 2)
    fill(found, 0, 13)
    checkpoint = save(found, paths, 1)
    for capacity, newest in ((20, 800), (4000, 300)):
        (other,) = buffers(tmp_path, capacity=capacity)
        other.load(checkpoint)
        assert len(other) == min(capacity, 40)
        assert batch([other])[:, 0].min() >= newest
        fill([other], 13, 1)
        assert len(other) == min(capacity, 44)
    wide = ReplayBuffer(40, range(3), 3, 0, tmp_path / "ring")
    wide.load(checkpoint)
    assert len(wide) == 39 and batch([wide])[:, 0].min() >= 300
    wide.add(play(20, 1, range(3)))
    assert len(wide) == 39


def test_damage_is_named(tmp_path):
    paths = RunPaths(tmp_path / "run")
    found = buffers(tmp_path, 2)
    (empty,) = buffers(tmp_path)
    with pytest.raises(CheckpointError, match="holds no replay buffer"):
        empty.load(tmp_path)
    fill(found, 0, 3)
    checkpoint = save(found, paths, 1)
    (checkpoint / "replay" / "index-1.json").unlink()
    with pytest.raises(CheckpointError, match="a file of some rank is missing"):
        empty.load(checkpoint)


def test_an_empty_buffer_is_saved_too(tmp_path):
    found = buffers(tmp_path)
    checkpoint = save(found, RunPaths(tmp_path / "run"), 1)
    fill(found, 0, 3)
    found[0].load(checkpoint)
    assert len(found[0]) == 0 and inspect(checkpoint)["transitions"] == 0


def test_any_range_of_transitions_is_read_from_the_files_of_all_ranks(tmp_path: Path) -> None:
    found = buffers(tmp_path, 2)
    paths = RunPaths(tmp_path / "run")
    for step in (1, 2, 3):
        fill(found, 4 * step, 4)
        checkpoint = save(found, paths, step)
    stored = StoredReplay(checkpoint)
    whole = stored.transitions()
    assert whole["rewards"].tolist() == [100.0 * decision + slot for decision in range(6, 16) for slot in range(SLOTS)]
    for first in range(0, len(stored), 3):
        for stop in range(first + 1, len(stored) + 1, 5):
            assert np.array_equal(stored.take(first, stop), whole[first:stop])
    assert sorted(stored.column("rewards").tolist()) == sorted(whole["rewards"].tolist())


@pytest.mark.parametrize("change", ["format", "name", "shape"])
def test_an_index_of_another_kind_is_named(change: str, tmp_path: Path) -> None:
    found = buffers(tmp_path)
    fill(found, 0, 3)
    checkpoint = save(found, RunPaths(tmp_path / "run"), 1)
    index = checkpoint / "replay" / "index-0.json"
    text = index.read_text()
    words = {
        "format": ('"format": 1', '"format": 9'),
        "name": ('"0-0-3.npy"', '"../x.npy"'),
        "shape": ('"stop": 3', '"stop": 2'),
    }
    assert words[change][0] in text
    index.write_text(text.replace(*words[change]))
    with pytest.raises(CheckpointError, match=r"index-0\.json|its index says"):
        StoredReplay(checkpoint)
