"""Images of a replay buffer: each is stored once, and every transition gets back what it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.checkpoint import CheckpointWriter, verify
from rlhpc.embodied.data.frame_store import FrameRing, ImageLayout
from rlhpc.embodied.data.replay_buffer import ReplayBuffer, inspect, merge, split
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError

SLOTS = 4


class Player:
    """Plays episodes of random lengths whose observations stack images, oldest first; also drops and swaps transitions."""

    def __init__(
        self, seed: int, stack: int, *, is_last: bool = True, mean_length: int = 12, size: int = 6, swaps: float = 0.3
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.stack, self.is_last, self.mean_length, self.size = stack, is_last, mean_length, size
        self.swaps = swaps
        self.stacks = [[self.image()] * stack for _ in range(SLOTS)]
        self.count = 0

    def image(self) -> np.ndarray:
        if self.random.random() < 0.1:  # a picture that does not change
            return np.zeros((self.size, self.size, 3), np.uint8)
        return self.random.integers(0, 256, (self.size, self.size, 3), np.uint8)

    def observe(self, stack: list[np.ndarray]) -> np.ndarray:
        image = np.concatenate(stack, -1)
        return image if self.is_last else np.ascontiguousarray(image.transpose(2, 0, 1))

    def play(self, steps: int) -> dict[str, np.ndarray]:
        """Transitions `[slots, steps]`."""
        rows: list[list[tuple[Any, ...]]] = [[] for _ in range(SLOTS)]
        for _ in range(steps):
            for slot in range(SLOTS):
                before = self.stacks[slot]
                after = [*before[1:], self.image()]
                self.count += 1
                rows[slot].append((self.observe(before), self.observe(after), float(self.count)))
                ends = self.random.random() < 1 / self.mean_length
                self.stacks[slot] = [self.image()] * self.stack if ends else after
        if self.random.random() < self.swaps:  # transitions that were regrouped are in other slots
            self.random.shuffle(rows)
        obs, next_obs, numbers = (
            np.array([[row[i] for row in slot] for slot in rows]) for i in range(3)
        )  # fmt: skip
        rewards = numbers.astype(np.float32)
        return {
            "obs.rgb": obs, "next_obs.rgb": next_obs, "obs.state": rewards[..., None], "next_obs.state": rewards[..., None],
            "actions": np.zeros((SLOTS, steps, 1, 1), np.float32), "rewards": rewards,
            "terminations": np.zeros((SLOTS, steps), bool),
        }  # fmt: skip


def contents(buffers: list[ReplayBuffer]) -> dict[float, tuple[bytes, bytes]]:
    """Images of all transitions, by their rewards."""
    found = {}
    for buffer in buffers:
        _, rows = buffer.local_rows(np.arange(len(buffer)))
        out = np.empty((len(rows), buffer.dtype.itemsize), np.uint8)
        buffer.gather(rows, out)
        for row in out.view(buffer.dtype)[:, 0]:
            found[float(row["rewards"])] = row["obs.rgb"].tobytes(), row["next_obs.rgb"].tobytes()
    return found


def expected(played: list[dict[str, np.ndarray]], capacity: int) -> dict[float, tuple[bytes, bytes]]:
    columns = {name: np.concatenate([part[name] for part in played], 1)[:, -capacity:] for name in played[0]}
    return {
        float(columns["rewards"][slot, t]): tuple(
            columns[name][slot, t].tobytes() for name in ("obs.rgb", "next_obs.rgb")
        )
        for slot in range(SLOTS)
        for t in range(columns["rewards"].shape[1])
    }


def parts_of(columns: dict[str, np.ndarray], share: range) -> dict[str, np.ndarray]:
    return {name: column[share.start : share.stop] for name, column in columns.items()}


def buffers_of(folder: Path, capacity: int, stack: int, ranks: int = 1, slots: int = SLOTS) -> list[ReplayBuffer]:
    n = slots // ranks
    return [
        ReplayBuffer(capacity * slots, range(r * n, (r + 1) * n), slots, r, folder / "ring", stack)
        for r in range(ranks)
    ]


def save(buffers: list[ReplayBuffer], paths: RunPaths, step: int) -> Path:
    with CheckpointWriter(paths, step) as writer:
        for buffer in buffers:
            buffer.save(writer.staging)
        return writer.commit()


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_transition_gets_its_images_back(tmp_path: Path, seed: int, stack: int, is_last: bool) -> None:
    """Also after wraps, in parts of any length, and after a resume by the same and by other layouts."""
    player, played = Player(seed, stack, is_last=is_last, mean_length=3 + seed), list[Any]()
    capacity = 17
    (buffer,) = buffers = buffers_of(tmp_path, capacity, stack)
    paths = RunPaths(tmp_path / "run")
    for step in range(1, 9):
        played.append(player.play(int(player.random.integers(1, 9))))
        buffer.add(played[-1])
        checkpoint = save(buffers, paths, step)
        assert verify(checkpoint) == []
        assert contents(buffers) == expected(played, capacity)
        if step % 3 == 0:  # goes on from the checkpoint
            (buffer,) = buffers = buffers_of(tmp_path, capacity, stack)
            buffer.load(checkpoint)
            assert contents(buffers) == expected(played, capacity)
    stored = StoredReplay(checkpoint)
    in_order = {float(row["rewards"]): row["obs.rgb"].tobytes() for row in stored.transitions()}
    assert in_order == {reward: images[0] for reward, images in expected(played, capacity).items()}
    for ranks in (2, 4):
        others = buffers_of(tmp_path, capacity, stack, ranks)
        for other in others:
            other.load(checkpoint)
        assert contents(others) == expected(played, capacity)
        more = player.play(5)
        for other in others:
            other.add(parts_of(more, other.share))
        assert contents(others) == expected([*played, more], capacity)
        again = save(others, paths, 10 + ranks)
        (whole,) = buffers_of(tmp_path, capacity, stack)
        whole.load(again)
        assert contents([whole]) == expected([*played, more], capacity)
    fewer = buffers_of(tmp_path, capacity, stack, slots=2)
    fewer[0].load(checkpoint)
    assert contents(fewer).items() <= expected(played, capacity).items() and len(fewer[0]) == 2 * capacity


def test_a_frame_costs_its_bytes(tmp_path: Path) -> None:
    """1.0 to 1.1 times, with episodes of 25 decisions, one image each and stacked; never more than what is stored twice."""
    for stack in (1, 4):
        player = Player(1, stack, mean_length=25, size=16, swaps=0)
        (buffer,) = buffers_of(tmp_path, 400, stack)
        for _ in range(30):
            buffer.add(player.play(40))
        frame_bytes = 16 * 16 * 3
        rows = 400 * SLOTS
        numbers = rows * buffer._ring.dtype.itemsize
        assert rows * frame_bytes <= buffer.nbytes - numbers <= 1.1 * rows * frame_bytes, stack


def test_a_save_writes_only_new_frames_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    player, again = (Player(5, 2) for _ in range(2))
    (buffer,) = buffers = buffers_of(tmp_path, 100, 2)
    buffer.add(player.play(60))
    first = save(buffers, paths, 1)
    buffer.add(player.play(3))
    second = save(buffers, paths, 2)
    sizes = {path.name: path.stat().st_size for path in (second / "replay").glob("images*.npy")}
    old = {path.name for path in (first / "replay").glob("images*.npy")}
    assert old < sizes.keys()
    assert sum(size for name, size in sizes.items() if name not in old) < 0.2 * sum(sizes.values())
    (resumed,) = others = buffers_of(tmp_path, 100, 2)
    resumed.load(second)
    again.play(60), again.play(3)
    later = again.play(50)
    resumed.add(later)
    buffer.add(later)
    one, two = save(buffers, paths, 3), save(others, RunPaths(tmp_path / "other"), 3)
    assert StoredReplay(one).transitions().tobytes() == StoredReplay(two).transitions().tobytes()
    assert inspect(one)["transitions"] == 400 and "obs.rgb uint8[6, 6, 6]" in inspect(one)["columns"]


def test_stored_images_are_merged_and_split(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    player = Player(6, 1)
    (buffer,) = buffers = buffers_of(tmp_path, 40, 1)
    buffer.add(player.play(30))
    checkpoint = save(buffers, paths, 1)
    whole = StoredReplay(checkpoint).transitions()
    assert split(checkpoint, tmp_path / "cut", 3) == [40, 40, 40]
    assert merge([tmp_path / "cut" / str(part) for part in range(3)], tmp_path / "joined") == 120
    assert StoredReplay(tmp_path / "joined").transitions().tobytes() == whole.tobytes()


def test_a_stack_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (buffer,) = buffers_of(tmp_path, 10, 4)
    with pytest.raises(ConfigError, match=r"algorithm\.replay_buffer\.frame_stack is 4.* 3 channels"):
        buffer.add(Player(0, 1).play(1))
    with pytest.raises(ConfigError, match="frame_stack"):
        ImageLayout((5, 8, 8), 2)


def test_images_that_do_not_fit_say_so_at_once(tmp_path: Path) -> None:
    (buffer,) = buffers_of(tmp_path, 10**12, 1)
    with pytest.raises(ConfigError, match=r"algorithm\.replay_buffer\.size.*GiB.*cluster\.scratch"):
        buffer.add(Player(0, 1).play(1))
    assert list((tmp_path / "ring").iterdir()) == []


def test_a_ring_grows_and_uses_dropped_blocks_again(tmp_path: Path) -> None:
    ring = FrameRing(2, 64, tmp_path)
    size = ring.nbytes
    for number in range(200):
        (added,) = ring.append(np.full((1, 2), number % 256, np.uint8))
        assert added == number
        ring.drop_before(number - 50)
    assert ring.nbytes == size and ring.read(np.arange(150, 200))[:, 0].tolist() == list(range(150, 200))
    for number in range(200, 400):
        ring.append(np.full((1, 2), number % 256, np.uint8))
    assert ring.nbytes > size
    assert ring.read(np.arange(150, 400))[:, 1].tolist() == [number % 256 for number in range(150, 400)]
    assert np.concatenate(ring.parts(151, 399))[:, 0].tolist() == [number % 256 for number in range(151, 399)]
