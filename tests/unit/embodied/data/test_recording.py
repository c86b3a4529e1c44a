"""Datasets of a recording, whatever ends it."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.recording import Recording, incomplete_datasets
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from rlhpc.embodied.data.trajectory import EpisodeWriter
from rlhpc.runtime.errors import ConfigError, NonFinite, StorageError
from tests.extras import need_extra
from tests.filesystems.beds import need_mounts, small_filesystem


def writer(path: Path) -> EpisodeWriter:
    if path.suffix == ".h5":
        return TrajectoryWriter(path, env_id="test")
    need_extra("embodied")
    return LeRobotWriter(path, fps=10, task="test")


def episode(length: int = 3, size: int = 2, seed: int = 0) -> dict[str, Any]:
    """An episode with pictures of noise, which no format makes smaller."""
    pictures = np.random.default_rng(seed).integers(0, 256, (length + 1, size, size, 3), np.uint8)
    ends = np.arange(length) == length - 1
    return {
        "source": "test", "obs": {"state": np.zeros((length + 1, 2), np.float32), "rgb": pictures},
        "actions": np.ones((length, 1), np.float32), "rewards": np.ones(length, np.float32), "terminations": ends,
        "truncations": np.zeros(length, bool), "success": ends, "env_states": None, "seed": None,
    }  # fmt: skip


def cut(trajectory: dict[str, Any]) -> dict[str, Any]:
    return {**trajectory, "terminations": trajectory["truncations"], "success": trajectory["truncations"]}


def lengths(path: Path) -> list[int]:
    return [len(trajectory["actions"]) for trajectory in read_trajectories(path)]


@pytest.mark.parametrize("name", ["a.h5", "a"])
def test_episodes_that_ended_early_lie_beside_the_complete_ones(tmp_path: Path, name: str) -> None:
    """A folder of files does not include them, and another recording adds to them."""
    for number in range(2):
        output = tmp_path / str(number) / name
        with pytest.raises(RuntimeError) as caught, Recording(writer, output, keeps=True) as recording:
            recording.add(episode())
            recording.add_incomplete(cut(episode(2)))
            recording.add(episode(4))
            recording.add_incomplete(cut(episode(5)))
            raise RuntimeError("the camera is lost")
        assert lengths(output) == [3, 4] and [lengths(path) for path in incomplete_datasets(output)] == [[2], [5]]
        [note] = caught.value.__notes__
        assert (
            f"complete episodes: 2 in {output}; ended early: 2 (7 steps) in {output.parent / 'a.incomplete'}, " in note
        )
        for trajectory in read_trajectories(incomplete_datasets(output)):
            assert trajectory["truncations"].tolist()[-1:] == [True] and not trajectory["success"].any()
    if name == "a.h5":
        assert lengths(output.parent) == [3, 4]
    output.rename(tmp_path / "moved") if name == "a" else output.unlink()
    with pytest.raises(RuntimeError), Recording(writer, output, keeps=True) as recording:
        recording.add_incomplete(cut(episode(6)))
        raise RuntimeError("again")
    assert [lengths(path) for path in incomplete_datasets(output)] == [[2], [5], [6]] and not output.exists()


def test_what_a_simulator_can_play_again_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught, Recording(writer, tmp_path / "a.h5", keeps=False) as recording:
        recording.add(episode())
        recording.add_incomplete(cut(episode()))
        raise RuntimeError("a fault")
    assert list(tmp_path.iterdir()) == [] and not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("name", ["a.h5", "a"])
def test_a_dataset_that_counts_as_a_whole_is_moved(tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    with pytest.raises(RuntimeError), Recording(writer, output, keeps=True, counts_whole=True) as recording:
        recording.add(episode())
        raise RuntimeError("the window was closed")
    assert not output.exists() and [lengths(path) for path in incomplete_datasets(output)] == [[3]]
    assert [path.name for path in tmp_path.iterdir()] == ["a.incomplete"]


def record_until_killed(output: Path) -> None:
    """Records in a process that is killed while it writes its third episode; another one ended early."""

    def record() -> None:
        with Recording(writer, output, keeps=True) as recording:
            recording.add({**episode(3, seed=1), "taken": np.array([True, False, True])})
            recording.add_incomplete(cut(episode(2)))
            recording.add({**episode(4, seed=2), "taken": np.zeros(4, bool)})
            recording.prepare_step(1000)
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            recording.add({**episode(3000, 64, seed=3), "taken": np.zeros(3000, bool)})
            threading.Event().wait()

    process = multiprocessing.get_context("fork").Process(target=record)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and not output.exists()


@pytest.mark.parametrize("name", ["a.h5", "a"])
def test_the_next_recording_recovers_what_a_killed_one_recorded(tmp_path: Path, name: str) -> None:
    """As if a signal had ended it: the dataset has its complete episodes, and it is not replaced."""
    writer(tmp_path / "other").discard()
    output = tmp_path / name
    record_until_killed(output)
    with pytest.raises(ConfigError) as caught:
        Recording(writer, output, keeps=True)
    assert ") of a killed recording; name another file, and join them" in str(caught.value)
    recovered = list(read_trajectories(output))
    assert [len(trajectory["actions"]) for trajectory in recovered][:2] == [3, 4]
    for trajectory, seed in zip(recovered[:2], (1, 2), strict=True):
        expected = episode(len(trajectory["actions"]), seed=seed)
        num_rows = len(expected["actions"]) + (name == "a.h5")  # LeRobot has no last observation
        np.testing.assert_array_equal(trajectory["obs"]["rgb"][:num_rows], expected["obs"]["rgb"][:num_rows])
        np.testing.assert_array_equal(trajectory["success"], expected["success"])
    if name == "a":
        from pyarrow import parquet

        table = parquet.read_table(output / "data/chunk-000/file-000.parquet").to_pydict()
        assert table["complementary_info.is_intervention"][:7] == [True, False, True, False, False, False, False]
    assert [lengths(path) for path in incomplete_datasets(output)] == [[2]]
    names = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".partial.h5")}
    assert names == {output.name, "a.incomplete"} | ({"a.json"} if name == "a.h5" else set())


def test_a_round_that_was_killed_is_recorded_again_beside_what_it_had(tmp_path: Path) -> None:
    output = tmp_path / "a.h5"
    record_until_killed(output)
    with Recording(writer, output, keeps=True, counts_whole=True) as recording:
        recording.add(episode(6))
    assert lengths(output) == [6] and sorted(tmp_path.glob("*.recording")) == []
    assert [lengths(path)[:2] for path in incomplete_datasets(output)] == [[2], [3, 4]]


def test_one_process_at_a_time_records_a_dataset(tmp_path: Path) -> None:
    with Recording(writer, tmp_path / "a.h5", keeps=True) as recording:
        recording.add(episode())
        with pytest.raises(ConfigError, match=r"a\.h5 is being recorded by another process; name another file"):
            Recording(writer, tmp_path / "a.h5", keeps=True)
    assert lengths(tmp_path / "a.h5") == [3] and not (tmp_path / "a.recording").exists()


def spoiled(field: str, row: int) -> dict[str, Any]:
    """An episode of 5 steps with a number that is not finite."""
    trajectory = episode(5)
    array = trajectory["obs"]["state"] if field == "obs" else trajectory["actions"]
    array[row] = np.nan
    return trajectory


@pytest.mark.parametrize("name", ["a.h5", "a"])
@pytest.mark.parametrize(
    ("field", "row", "num_steps"), [("actions", 3, 3), ("obs", 3, 2), ("obs", 5, 4), ("obs", 1, 0)]
)
def test_of_an_episode_that_is_not_finite_the_steps_before_are_kept(
    tmp_path: Path, name: str, field: str, row: int, num_steps: int
) -> None:
    """The recording goes on, and says it once."""
    output = tmp_path / name
    with Recording(writer, output, keeps=True) as recording:
        recording.add(episode(3))
        recording.add(spoiled(field, row))
        recording.add(episode(4))
    assert lengths(output) == [3, 4]
    kept = [trajectory for path in incomplete_datasets(output) for trajectory in read_trajectories(path)]
    assert [len(trajectory["actions"]) for trajectory in kept] == [num_steps] * bool(num_steps)
    assert all(trajectory["truncations"][-1] and not trajectory["success"].any() for trajectory in kept)
    summary = recording.summary()
    assert "left out because of a number that is not finite: 1; test: " in summary
    assert f"{'obs.state' if field == 'obs' else 'actions'} of step {row} is not finite" in summary


def test_a_simulator_plays_an_episode_again_that_is_not_finite(tmp_path: Path) -> None:
    with Recording(writer, tmp_path / "a.h5", keeps=False) as recording:
        recording.add(spoiled("obs", 3))
        recording.add(episode(3))
    assert lengths(tmp_path / "a.h5") == [3] and "a number that is not finite: 1" in recording.summary()
    assert {path.name for path in tmp_path.iterdir()} == {"a.h5", "a.json"}


def test_a_recording_ends_if_its_episodes_are_never_finite(tmp_path: Path) -> None:
    with (
        pytest.raises(NonFinite, match="20 episodes are not finite"),
        Recording(writer, tmp_path / "a.h5", keeps=True) as r,
    ):
        r.add(episode(3))
        while True:
            r.add(spoiled("actions", 0))
    assert lengths(tmp_path / "a.h5") == [3]


def test_a_recording_does_not_replace_another(tmp_path: Path) -> None:
    output = tmp_path / "a.h5"
    with Recording(writer, output, keeps=False) as recording:
        recording.add(episode())
    with pytest.raises(ConfigError, match=r"a\.h5 is there already; name another file, .* rlhpc data merge"):
        Recording(writer, output, keeps=False)
    assert lengths(output) == [3]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_while_an_episode_is_written_waits_for_it(tmp_path: Path, signum: signal.Signals) -> None:
    class Slow(TrajectoryWriter):
        def add(self, trajectory: Any) -> None:
            signal.raise_signal(signum)
            signal.raise_signal(signum)
            super().add(trajectory)

    before = signal.getsignal(signum)

    def open_writer(path: Path) -> EpisodeWriter:
        return Slow(path, env_id="test")

    with pytest.raises(KeyboardInterrupt), Recording(open_writer, tmp_path / "a.h5", keeps=True) as recording:
        recording.prepare_step(0)
        recording.add(episode())
        assert len(recording) == 1
        recording.prepare_step(0)
    assert lengths(tmp_path / "a.h5") == [3] and signal.getsignal(signum) is before


def test_a_filesystem_that_cannot_reserve_space_is_recorded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with Recording(writer, tmp_path / "a.h5", keeps=True) as recording:
        recording.prepare_step(1 << 20)
        recording.add(episode(3))
    assert lengths(tmp_path / "a.h5") == [3] and not list(tmp_path.glob(".a*"))


@pytest.mark.parametrize("name", ["a.h5", "a"])
def test_a_disk_that_fills_up_ends_the_recording_while_all_of_it_can_be_written(tmp_path: Path, name: str) -> None:
    """The space for the episode in progress was reserved: it and all episodes before it are on that disk."""
    need_mounts()
    step_bytes = 64 * 64 * 3
    with small_filesystem(tmp_path, "tmpfs", 24) as folder:
        output, num_steps = folder / name, 0
        is_full = pytest.raises(StorageError, match=r"is full, .* MiB are free: make room")
        with is_full as caught, Recording(writer, output, keeps=True) as recording:
            recording.add(episode(300, 64, seed=1))
            try:
                for num_steps in range(1, 5000):
                    recording.prepare_step((num_steps + 1) * step_bytes)
            except StorageError:
                recording.add_incomplete(cut(episode(num_steps, 64, seed=2)))
                raise
        assert "complete episodes: 1" in caught.value.__notes__[0] and num_steps > 200
        assert lengths(output) == [300] and lengths(incomplete_datasets(output)[0]) == [num_steps]
        [trajectory] = read_trajectories(incomplete_datasets(output)[0])
        np.testing.assert_array_equal(trajectory["obs"]["rgb"][:-1], episode(num_steps, 64, seed=2)["obs"]["rgb"][:-1])
        assert not [path for path in folder.iterdir() if path.name.startswith(".a")]
        with contextlib.suppress(OSError), (folder / "other").open("wb") as file:
            file.write(bytes(32 << 20))
        os.truncate(folder / "other", (folder / "other").stat().st_size - (1 << 20))
        with pytest.raises(StorageError, match="is full"), Recording(writer, folder / f"b{output.suffix}", keeps=True):
            pass
        assert not [path for path in folder.iterdir() if path.name.startswith(("b", ".b"))]


@pytest.mark.parametrize("name", ["a.h5", "a"])
def test_episodes_go_elsewhere_if_the_disk_has_no_room_at_all(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took the space that was given back to write the episode."""
    need_mounts()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with small_filesystem(tmp_path / "disk", "tmpfs", 24) as folder:
        output = folder / name
        with pytest.raises(RuntimeError) as caught, Recording(writer, output, keeps=True) as recording:
            recording.add(episode(10))
            with contextlib.suppress(OSError), (folder / "other").open("wb") as file:
                file.write(bytes(32 << 20))
            recording._reserve.release = lambda: None  # type: ignore[method-assign]
            recording.add_incomplete(cut(episode(100, 64)))
            raise RuntimeError("the end")
        (folder / "other").unlink()
        [moved] = tmp_path.glob(f"rlhpc-recording-*/a.incomplete/0{output.suffix}")
        assert str(moved) in caught.value.__notes__[0] and "is full" in caught.value.__notes__[0]
        assert lengths(moved) == [100]
