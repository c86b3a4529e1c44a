"""Datasets of a recording: one of the complete episodes, and next to it one of the episodes that ended early.

What a person or a robot did cannot be had again, so that it is written whatever ends the recording. An episode without its
end is not a demonstration of the task: it lies in a dataset that is read only if it is named.

A dataset is complete only once it is closed. Until then its episodes also lie in a journal, from which the next recording of
the same dataset recovers those of a process that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rlhpc.checkpoint.export_folder import remove_staging
from rlhpc.embodied.data.trajectories import read_trajectories
from rlhpc.embodied.data.trajectory import EpisodeWriter, describe_nonfinite, finite_part
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import ConfigError, NonFinite
from rlhpc.runtime.files import remove_tree, rename
from rlhpc.runtime.interrupts import Interrupts

#: Free bytes that a recording needs besides the episode in progress: tables of contents, and the ends of files.
_MARGIN_BYTES = 8 << 20
#: Number of episodes with non-finite numbers that end a recording.
_MAX_NONFINITE = 20
#: Errors of filesystems that cannot reserve space, on which a recording goes on without.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def incomplete_folder(output: Path) -> Path:
    """Returns the folder of the episodes that ended early, next to the dataset `output`."""
    return output.with_name(f"{output.name.removesuffix('.h5')}.incomplete")


def incomplete_datasets(output: Path) -> list[Path]:
    """Returns the datasets of episodes that ended early in recordings of `output`, oldest first."""
    return _numbered_datasets(incomplete_folder(output))


def _numbered_path(folder: Path, number: int, output: Path) -> Path:
    """Returns the path of a dataset in the format of `output` whose name is a number."""
    return folder / f"{number}{output.suffix if output.suffix == '.h5' else ''}"


def _numbered_datasets(folder: Path) -> list[Path]:
    """Returns the datasets of a folder whose names are numbers, in their order."""
    datasets = [path for path in folder.glob("*") if path.suffix in ("", ".h5")]
    return sorted((path for path in datasets if path.stem.isdigit()), key=lambda path: int(path.stem))


class Recording:
    """Writer of a recording, for use in a `with` statement. Its end with an error keeps or removes what was written.

    In the block, signals end the recording in order (`Interrupts`); none of them interrupts the writing of an episode. If an
    earlier recording of the dataset was killed, its complete episodes become the dataset, as if a signal had ended it.

    Args:
        open_writer: Builds the writer of a dataset.
        output: Path of the dataset.
        keeps: Whether an error keeps the episodes, because a person or a robot made them. A simulator plays its again.
        counts_whole: Whether the dataset counts as finished once it exists, so that an error moves its episodes to
            `incomplete_datasets`.

    Attributes:
        num_incomplete: Number of episodes that ended early.
        num_nonfinite: Number of complete episodes that were left out because of a non-finite number.

    Raises:
        ConfigError: The dataset exists, or another process records it.
    """

    def __init__(
        self, open_writer: Callable[[Path], EpisodeWriter], output: Path, *, keeps: bool, counts_whole: bool = False
    ) -> None:
        self._open_writer, self._output = open_writer, output
        self._keeps, self._counts_whole = keeps, counts_whole
        self._reserve = _Reserve(output.with_name(f".{output.name}.reserve"))
        self._journal = _Journal(output)
        num_recovered = self._recover()
        if num_recovered or output.is_file():
            recovered_text = (
                f", with the complete episodes ({num_recovered}) of a killed recording" if num_recovered else ""
            )
            raise ConfigError(
                f"{output} is there already{recovered_text}; name another file, and join them with rlhpc data merge"
            )
        self._writer = open_writer(output)
        self._incomplete_paths: list[Path] = []
        self.num_incomplete = self.num_nonfinite = self._num_incomplete_steps = 0
        self._interrupts = Interrupts()
        self._problems: list[str] = []

    def _recover(self) -> int:
        """Makes the dataset of a recording that was killed. Returns its number of episodes; 0 if it was moved
        (`counts_whole`).

        Raises:
            ConfigError: Another process records the dataset.
        """
        is_taken = self._output.is_file() or (self._output.is_dir() and any(self._output.iterdir()))
        if is_taken or not self._journal.exists():
            return 0
        self._journal.lock()
        self._reserve.release()
        remove_staging(self._output)
        num_episodes = 0
        if datasets := self._journal.datasets():
            with self._open_writer(self._output) as writer:
                for trajectory in read_trajectories(datasets, require=("actions",)):
                    writer.add(trajectory)
                num_episodes = len(writer)
            if self._counts_whole:
                _move(self._output, _next_incomplete(self._output))
        self._journal.remove()
        return 0 if self._counts_whole else num_episodes

    def __len__(self) -> int:
        """Returns the number of complete episodes."""
        return len(self._writer)

    def __enter__(self) -> Self:
        self._interrupts.install()
        try:
            if self._keeps:
                self._journal.lock()
            self.prepare_step(0)
        except BaseException:
            self._interrupts.restore()
            self._reserve.release()
            self._writer.discard()
            self._journal.remove()
            raise
        return self

    def prepare_step(self, num_bytes: int) -> None:
        """Reserves space on the disk for the episodes in progress, so that they can be written if it fills up.

        Args:
            num_bytes: Size of the episodes in progress.

        Raises:
            StorageError: There is not that much space.
            KeyboardInterrupt: A signal came while an episode was written.
        """
        self._interrupts.check()
        if self._keeps:
            # An episode is written to the journal and to the dataset.
            self._reserve.require(2 * num_bytes + _MARGIN_BYTES)

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds a complete episode (`EpisodeWriter.add`). One with a non-finite observation or action is left out; the steps
        before it are kept like those of an episode that ended early.

        Raises:
            NonFinite: Many episodes are not finite.
        """
        problem = describe_nonfinite(dict(trajectory), ("obs", "actions"))
        if problem:
            self.num_nonfinite += 1
            if self.num_nonfinite == 1:
                self._problems.append(problem)
            if self.num_nonfinite == _MAX_NONFINITE:
                raise NonFinite(f"{_MAX_NONFINITE} episodes are not finite (the last: {problem}); the recording ends")
            self.add_incomplete(trajectory)
            return
        with self._interrupts.deferred():
            self._reserve.release()
            if self._keeps:
                self._journal.add(trajectory, self._open_writer)
            self._writer.add(trajectory)

    def add_incomplete(self, trajectory: Mapping[str, Any]) -> None:
        """Adds the finite part of an episode that ended early, unless a simulator can play it again. Its last step becomes a
        truncation, and it is no success unless its steps say so. If it cannot be written beside the complete ones, it is
        written to the folder for temporary files.
        """
        if not self._keeps:
            return
        trajectory = finite_part(dict(trajectory))
        if not len(trajectory["actions"]):
            return
        truncations, success = np.zeros((2, len(trajectory["actions"])), bool)
        truncations[-1] = not trajectory["terminations"][-1]
        success = success if trajectory["success"] is None else trajectory["success"]
        trajectory = {**trajectory, "truncations": truncations, "success": success}
        with self._interrupts.deferred():
            self._reserve.release()
            try:
                try:
                    path = self._write_incomplete(trajectory, self._output)
                except OSError as error:
                    self._problems.append(str(unwritten_page_error(error, self._output.parent)))
                    path = self._write_incomplete(trajectory, _temporary_folder() / self._output.name)
            except (OSError, ConfigError) as error:
                self._problems.append(f"{len(truncations)} steps are lost: {error}")
                return
        self._incomplete_paths.append(path)
        self.num_incomplete += 1
        self._num_incomplete_steps += len(truncations)

    def _write_incomplete(self, trajectory: Mapping[str, Any], output: Path) -> Path:
        """Writes a dataset of one episode to the folder of incomplete ones; returns its path."""
        path = _next_incomplete(output)
        with self._open_writer(path) as writer:
            writer.add(trajectory)
        return path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._interrupts.deferred():
                self._reserve.release()
                if error is None:
                    self._writer.close()
                    self._journal.remove()
                elif not self._keeps or not len(self):
                    self._writer.discard()
                    self._journal.remove()
                else:
                    self._close_early()
        finally:
            self._interrupts.restore()
            if error is not None and (summary := self.summary()):
                error.add_note(summary)

    def _close_early(self) -> None:
        """Closes the dataset after an error."""
        try:
            self._writer.close()
            if self._counts_whole:
                self._output = _move(self._output, _next_incomplete(self._output))
            self._journal.remove()
        except OSError as error:
            self._problems.append(str(unwritten_page_error(error, self._output)))

    def summary(self) -> str:
        """Returns a text about the episodes that are kept, and where, and about those that are left out; "" without any."""
        parts = [f"complete episodes: {len(self)} in {self._output}"] if self._keeps and len(self) else []
        if self.num_incomplete:
            parts.append(
                f"ended early: {self.num_incomplete} ({self._num_incomplete_steps} steps) in "
                f"{_format_paths(self._incomplete_paths)}, which is read only if it is named"
            )
        if self.num_nonfinite:
            parts.append(f"left out because of a number that is not finite: {self.num_nonfinite}")
        return "; ".join([*parts, *self._problems])


def _format_paths(paths: list[Path]) -> str:
    """Returns the path of one dataset, or the folders of several."""
    return str(paths[0]) if len(paths) == 1 else " and ".join(dict.fromkeys(str(path.parent) for path in paths))


class _Journal:
    """Complete episodes of a recording in progress, each in a closed dataset of its own.

    They lie in the folder `<output>.recording`, whose lock ends with the process that records.

    Args:
        output: Path of the recording's dataset.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._folder = output.with_name(f"{output.name.removesuffix('.h5')}.recording")
        self._num_episodes = 0
        self._lock_fd: int | None = None

    def exists(self) -> bool:
        """Returns whether a recording is in progress or was killed."""
        return self._folder.is_dir()

    def lock(self) -> None:
        """Creates the folder, and takes its lock.

        Raises:
            ConfigError: Another process records the dataset.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{self._output} is being recorded by another process; name another file") from None
        except OSError as error:  # a filesystem without locks
            if error.errno not in (*_CANNOT_RESERVE, errno.ENOLCK):
                os.close(fd)
                raise
        self._lock_fd = fd

    def add(self, trajectory: Mapping[str, Any], open_writer: Callable[[Path], EpisodeWriter]) -> None:
        """Writes an episode."""
        with open_writer(_numbered_path(self._folder, self._num_episodes, self._output)) as writer:
            writer.add(trajectory)
        self._num_episodes += 1

    def datasets(self) -> list[Path]:
        """Returns the datasets, in the order of the episodes."""
        return _numbered_datasets(self._folder)

    def remove(self) -> None:
        """Removes the folder, if this process has its lock."""
        if self._lock_fd is not None:
            remove_tree(self._folder)
            os.close(self._lock_fd)
            self._lock_fd = None


def _next_incomplete(output: Path) -> Path:
    """Returns the path of the next dataset in `incomplete_folder`."""
    existing = incomplete_datasets(output)
    return _numbered_path(incomplete_folder(output), int(existing[-1].stem) + 1 if existing else 0, output)


def _move(dataset: Path, target: Path) -> Path:
    """Moves a dataset, and returns its new path."""
    target.parent.mkdir(exist_ok=True)
    if dataset.suffix == ".h5":
        rename(dataset.with_suffix(".json"), target.with_suffix(".json"))
    rename(dataset, target)
    return target


def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="rlhpc-recording-"))


class _Reserve:
    """File that keeps space on the disk.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._num_bytes = path, 0

    def require(self, num_bytes: int) -> None:
        """Makes the file at least `num_bytes` large.

        Raises:
            StorageError: There is not that much space.
        """
        if num_bytes <= self._num_bytes:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # Twice as much as is needed now, so that a growing episode does not ask for it at each step.
                size = num_bytes if self._num_bytes == 0 else max(num_bytes, 2 * self._num_bytes)
                with contextlib.suppress(OSError):
                    os.posix_fallocate(fd, 0, size)
                    self._num_bytes = size
                    return
                os.posix_fallocate(fd, 0, num_bytes)
                self._num_bytes = num_bytes
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise unwritten_page_error(error, self._path.parent) from error

    def release(self) -> None:
        """Frees the reserved space."""
        self._path.unlink(missing_ok=True)
        self._num_bytes = 0
