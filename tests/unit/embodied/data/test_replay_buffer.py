"""The replay buffer: what is in it, what a batch is made of, and that a checkpoint brings it back on any layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from rlhpc.checkpoint import CheckpointWriter, verify
from rlhpc.cli import main
from rlhpc.embodied.data.replay_buffer import MAX_SEGMENTS, ReplayBuffer, inspect
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.data.transitions import SLOTS, batch, buffers, fill, mixtures, play


def save(found: list[ReplayBuffer], paths: RunPaths, step: int) -> Path:
    with CheckpointWriter(paths, step) as writer:
        for one in found:
            one.save(writer.staging)
        return writer.commit()


def test_it_keeps_the_newest_and_a_row_stays_together(tmp_path):
    (buffer,) = found = buffers(tmp_path)
    fill(found, 0, 7)
    assert len(buffer) == 28
    fill(found, 7, 6)
    assert len(buffer) == 40
    seen = set()
    for update in range(60):
        columns = mixtures(found)[0].draw(update).columns
        number = columns["rewards"]
        seen |= set(number.tolist())
        assert np.array_equal(columns["obs"][:, 0], number) and np.array_equal(columns["next_obs"][:, 0], number + 0.5)
        assert np.array_equal(columns["actions"][:, 0, 0], number / np.float32(7))
        assert np.array_equal(columns["terminations"], number % 3 == 0)
    assert seen == {float(decision * 100 + slot) for decision in range(3, 13) for slot in range(SLOTS)}


def test_more_than_fits_at_once_keeps_the_end(tmp_path):
    (buffer,) = found = buffers(tmp_path)
    fill(found, 0, 25)
    assert len(buffer) == 40 and batch(found)[:, 0].min() >= 1500


def test_a_batch_depends_on_seed_and_update_and_not_on_ranks(tmp_path):
    one, two, four = (buffers(tmp_path, ranks) for ranks in (1, 2, 4))
    for found in (one, two, four):
        fill(found, 0, 13)
    assert np.array_equal(batch(one), batch(two)) and np.array_equal(batch(one), batch(four))
    assert np.array_equal(batch(one), batch(one)) and not np.array_equal(batch(one), batch(one, update=6))


def test_columns_of_several_kinds_and_a_change_of_them(tmp_path):
    (buffer,) = found = buffers(tmp_path)
    buffer.add(play(0, 3, range(SLOTS), images=True))
    columns = mixtures(found)[0].draw(0).columns
    assert columns["obs.rgb"].shape == (16, 4, 5, 3) and columns["obs.rgb"].dtype == np.uint8
    assert np.array_equal(columns["obs.rgb"][:, 3, 4, 2], columns["rewards"] % 256)
    with pytest.raises(ConfigError, match=r"obs\.rgb"):
        buffer.add(play(3, 1, range(SLOTS)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("again", [1, 2])
def test_a_checkpoint_brings_it_back_on_any_number_of_ranks(tmp_path, ranks, again):
    paths = RunPaths(tmp_path / "run")
    found = buffers(tmp_path, ranks)
    for step in range(1, 7):
        fill(found, 3 * step, 3)
        checkpoint = save(found, paths, step)
        assert verify(checkpoint) == []
    restored = buffers(tmp_path, again)
    for one in restored:
        one.load(checkpoint)
    assert np.array_equal(batch(restored), batch(found))
    for more in (found, restored):
        fill(more, 21, 5)
    assert np.array_equal(batch(restored), batch(found))
    for one in restored:  # and back into a buffer that has gone on since
        one.load(checkpoint)
    fill(restored, 21, 5)
    assert np.array_equal(batch(restored), batch(found))


def test_a_save_writes_only_what_is_new(tmp_path):
    paths = RunPaths(tmp_path / "run")
    found = buffers(tmp_path, capacity=400)
    fill(found, 0, 50)
    first = save(found, paths, 1)
    fill(found, 50, 2)
    second = save(found, paths, 2)
    old, new = (sorted((folder / "replay").glob("*.npy")) for folder in (first, second))
    assert [path.name for path in new] == ["0-0-50.npy", "0-50-52.npy"]
    assert old[0].samefile(new[0])
    # Both checkpoints see the same bytes: damage shows in both.
    with new[0].open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"x")
    assert verify(first) and verify(second)


def test_files_that_are_gone_are_written_again_and_many_become_one(tmp_path):
    paths = RunPaths(tmp_path / "run")
    found = buffers(tmp_path, capacity=4000)
    for step in range(1, MAX_SEGMENTS + 3):
        fill(found, step, 1)
        checkpoint = save(found, paths, step)
        if step == 5:
            for file in checkpoint.rglob("*.npy"):
                file.unlink()
        assert step == 5 or verify(checkpoint) == []
        assert len(list(checkpoint.rglob("*.npy"))) <= MAX_SEGMENTS
    assert len(StoredReplay(checkpoint)) == (MAX_SEGMENTS + 2) * SLOTS
    assert StoredReplay(checkpoint).transitions()["rewards"].tolist()[:5] == [100, 101, 102, 103, 200]


def test_a_buffer_that_does_not_fit_says_so_at_once(tmp_path):
    huge = ReplayBuffer(10**14, range(SLOTS), SLOTS, 0, tmp_path / "ring")
    with pytest.raises(ConfigError, match=r"algorithm\.replay_buffer\.size.*GiB.*cluster\.scratch"):
        huge.add(play(0, 1, range(SLOTS)))
    assert list((tmp_path / "ring").iterdir()) == []


def test_tools(tmp_path, capsys):
    found = buffers(tmp_path, 2)
    fill(found, 0, 5)
    checkpoint = save(found, RunPaths(tmp_path / "run"), 1)
    assert main(["replay", "inspect", str(checkpoint)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["transitions"] == 20 and facts["ranks"] == 2 and "obs float32[2]" in facts["columns"]
    assert main(["replay", "split", str(checkpoint), "--parts", "3", "--output", str(tmp_path / "cut")]) == 0
    sizes = [inspect(tmp_path / "cut" / str(part))["transitions"] for part in range(3)]
    assert sizes == [7, 7, 6]
    parts = [str(tmp_path / "cut" / str(part)) for part in range(3)]
    assert main(["replay", "merge", *parts, "--output", str(tmp_path / "whole")]) == 0
    whole = StoredReplay(tmp_path / "whole").transitions()
    assert np.array_equal(whole, StoredReplay(checkpoint).transitions())
    capsys.readouterr()
    assert main(["replay", "merge", *parts, "--output", str(tmp_path / "whole")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["replay", "inspect", str(tmp_path)]) == 2
    assert main(["replay", "split", str(checkpoint), "--parts", "0", "--output", str(tmp_path / "none")]) == 2
