"""Batches of demonstrations from files: equal to those from arrays in memory, within a budget."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.datasets import WriteOptions, convert
from rlhpc.embodied.data.demo_stream import DemoStream, RowOptions
from rlhpc.embodied.data.demonstrations import DemoEpisode, index_demos
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from rlhpc.runs.configuration import load_config
from tests.extras import need_extra

BASE = Path(__file__).resolve().parents[4] / "configs" / "base" / "bc.yaml"
SIZE = 32
SPACE = spaces.Dict(
    {"state": spaces.Box(-9, 9, (3,), np.float32), "rgb": spaces.Box(0, 255, (SIZE, SIZE, 6), np.uint8)}
)
STACKED = spaces.Dict(
    {"state": spaces.Box(-9, 9, (2, 3), np.float32), "rgb": spaces.Box(0, 255, (3, SIZE, SIZE, 6), np.uint8)}
)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


def write(path: Path, lengths: list[int], seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    with TrajectoryWriter(path, env_id="test") as writer:
        for length in lengths:
            writer.add({
                "obs": {"state": rng.normal(size=(length + 1, 3)).astype(np.float32),
                        "rgb": rng.integers(0, 256, (length + 1, SIZE, SIZE, 6), np.uint8)},
                "actions": rng.uniform(-1, 1, (length, 2)).astype(np.float32),
                "rewards": rng.normal(size=length).astype(np.float32), "terminations": np.zeros(length, bool),
                "truncations": np.arange(length) == length - 1, "success": np.arange(length) > 2,
            })  # fmt: skip
    return path


def index(path: Path | list[str], *overrides: str) -> list[DemoEpisode]:
    demos = f"demos.path={path}" if isinstance(path, Path) else f"demos.path=[{','.join(path)}]"
    words = ["runner.name=bc", "runner.max_steps=1", "env.train.env_id=Pendulum-v1", "algorithm.bc_value_coef=1", demos]
    return index_demos(typed(BcConfig, load_config(BASE, [*words, *overrides])), spaces=(SPACE, ACTION))


def joined(path: Any, options: RowOptions) -> dict[str, np.ndarray]:
    """All rows from whole episodes in memory, by loops."""
    rows: dict[str, list[Any]] = {"state": [], "rgb": [], "actions": [], "is_pad": [], "returns": [], "success": []}
    for trajectory in read_trajectories(path):
        length = len(trajectory["actions"])
        for t in range(length):
            for name in ("state", "rgb"):
                array, box = trajectory["obs"][name], options.observation_space[name]
                window = box.shape[0] if len(box.shape) == array.ndim else 0
                steps = [max(0, t + options.obs_offset - back) for back in range(window - 1, -1, -1)]
                rows[name].append(array[steps] if window else array[t + options.obs_offset])
            chunk = [t + offset for offset in options.chunk]
            rows["actions"].append(trajectory["actions"][[min(max(step, 0), length - 1) for step in chunk]])
            rows["is_pad"].append([not 0 <= step < length for step in chunk])
            rows["returns"].append(2 * sum(0.9**k * float(r) for k, r in enumerate(trajectory["rewards"][t:])))
            rows["success"].append(float(trajectory["success"][t]))
    return {name: np.array(column) for name, column in rows.items()}


def in_format(name: str, path: Path) -> Path:
    if name == "hdf5":
        return path
    need_extra("embodied")
    target = path.with_suffix(f".{name}")
    options = WriteOptions("minari" if name == "minari" else "lerobot", fps=10, task="test", videos=name == "video")
    convert([str(path)], str(target), options)
    return target


@pytest.mark.parametrize("name", ["hdf5", "minari", "image", "video"])
@pytest.mark.parametrize(("space", "obs_offset"), [(SPACE, 0), (STACKED, 0), (SPACE, 1)])
def test_batches_are_those_of_episodes_in_memory(tmp_path: Path, name: str, space: Any, obs_offset: int) -> None:
    """In any order, from blocks that are dropped in between, with chunks beyond both ends of the episodes."""
    path = in_format(name, write(tmp_path / "a.h5", [4, 9, 5, 7]))
    options = RowOptions(space, range(-1, 3), obs_offset, ("success",), gamma=0.9, reward_scale=2.0)
    expected = joined(path, options)
    stream = DemoStream(index(path), options, 1 << 10)
    assert stream.total == 25 and stream.rows_of(1) == range(4, 13)
    rng = np.random.default_rng(1)
    for _ in range(3):
        rows = rng.permutation(25)[:8]
        batch = stream.read(rows)
        for column in ("actions", "is_pad", "success"):
            np.testing.assert_array_equal(batch[column], expected[column][rows])
        np.testing.assert_allclose(batch["returns"], expected["returns"][rows], rtol=1e-5)
        assert set(batch["obs"]) == {"state", "rgb"}
        for column in ("state", "rgb"):
            np.testing.assert_array_equal(batch["obs"][column], expected[column][rows])
    assert len(stream._blocks) == 1 < len(stream._block_starts), "the budget of numbers holds one block"
    stream.close()


def test_sources_follow_each_other(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / "a.h5", [4, 5])), str(write(tmp_path / "b.h5", [6], 1))]
    stream = DemoStream(index(paths), RowOptions(SPACE, range(1)), 1 << 20)
    expected = np.concatenate([trajectory["actions"] for trajectory in read_trajectories(paths)])
    rows = np.array([14, 0, 9, 4])
    np.testing.assert_array_equal(stream.read(rows)["actions"][:, 0], expected[rows])


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Of a dataset that is ten times as large as the budget, with batches read ahead."""
    path = write(tmp_path / "a.h5", [60] * 10)
    size, budget = 600 * SIZE * SIZE * 6, 400 << 10
    assert size > 8 * budget
    stream = DemoStream(index(path), RowOptions(SPACE, range(4)), budget)
    order, held = np.random.default_rng(0).permutation(600), []
    tracemalloc.start()
    for _ in stream.batches([np.split(part, 5) for part in np.split(order, 20)]):
        held.append(stream.retained_bytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(held) == 100 and budget / 2 < max(held) <= budget
    assert peak < budget + (200 << 10), "Python's objects are on top of it"
    assert stream.pool.num_read + stream.pool.num_cached == 601, "each image once, and the first once more"
    stream.close()


def test_a_minibatch_is_read_as_a_whole_as_far_as_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5", [20])
    for budget, sizes in ((1 << 30, [12, 8]), (8 * 8 * SIZE * SIZE * 6, [6, 6, 6, 2])):
        stream = DemoStream(index(path), RowOptions(SPACE, range(1)), budget)
        read, reads = stream.read, list[int]()

        def counted(rows: np.ndarray, read: Callable[..., Any] = read, reads: list[int] = reads) -> Any:
            reads.append(len(rows))
            return read(rows)

        monkeypatch.setattr(stream, "read", counted)
        order = np.random.default_rng(0).permutation(20)
        minibatches = [np.split(order[:12], 4), [order[12:15], order[15:18], order[18:]]]
        batches = list(stream.batches(minibatches))
        assert [len(batch["actions"]) for batch in batches] == [3, 3, 3, 3, 3, 3, 2]
        found = np.concatenate([batch["actions"] for batch in batches])
        np.testing.assert_array_equal(found, read(order)["actions"])
        assert reads == sizes


def test_what_is_wrong_in_the_thread_is_raised_where_batches_are_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", [20])
    stream = DemoStream(index(path), RowOptions(SPACE, range(1)), 1 << 20)
    threads = threading.active_count()
    batches = stream.batches([[np.arange(10)], [np.arange(30)], [np.arange(10)]])
    assert len(next(batches)["actions"]) == 10
    with pytest.raises(IndexError):
        list(batches)
    unused = stream.batches([[np.arange(10)]] * 5)
    next(unused)
    unused.close()
    assert threading.active_count() == threads
