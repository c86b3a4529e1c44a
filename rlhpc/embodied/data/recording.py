"""Datasets of a recording: one of the complete episodes, and next to it one of the episodes that ended early.

What a person or a robot did cannot be had again, so that it is written whatever ends the recording. An episode without its
end is not a demonstration of the task: it lies in a dataset that is read only if it is named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from rlhpc.embodied.data.trajectory import EpisodeWriter
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import rename
from rlhpc.runtime.interrupts import Interrupts

#: Free bytes that a recording needs besides the episode in progress: tables of contents, and the ends of files.
_MARGIN_BYTES = 8 << 20
#: Errors of filesystems that cannot reserve space, on which a recording goes on without.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def incomplete_folder(output: Path) -> Path:
    """Returns the folder of the episodes that ended early, next to the dataset `output`."""
    return output.with_name(f"{output.name.removesuffix('.h5')}.incomplete")


def incomplete_datasets(output: Path) -> list[Path]:
    """Returns the datasets of episodes that ended early in recordings of `output`, oldest first."""
    datasets = [path for path in incomplete_folder(output).glob("*") if path.suffix in ("", ".h5")]
    return sorted((path for path in datasets if path.stem.isdigit()), key=lambda path: int(path.stem))


class Recording:
    """Writer of a recording, for use in a `with` statement. Its end with an error keeps or removes what was written.

    In the block, signals end the recording in order (`Interrupts`); none of them interrupts the writing of an episode.

    Args:
        open_writer: Builds the writer of a dataset.
        output: Path of the dataset.
        keeps: Whether an error keeps the episodes, because a person or a robot made them. A simulator plays its again.
        counts_whole: Whether the dataset counts as finished once it exists, so that an error moves its episodes to
            `incomplete_datasets`.

    Attributes:
        num_incomplete: Number of episodes that ended early.

    Raises:
        ConfigError: The dataset exists.
    """

    def __init__(
        self, open_writer: Callable[[Path], EpisodeWriter], output: Path, *, keeps: bool, counts_whole: bool = False
    ) -> None:
        self._open_writer, self._output = open_writer, output
        self._keeps, self._counts_whole = keeps, counts_whole
        if output.is_file():
            raise ConfigError(f"{output} is there already; name another file, and join them with rlhpc data merge")
        self._writer = open_writer(output)
        self._incomplete_writer: EpisodeWriter | None = None
        self._incomplete_output = output
        self.num_incomplete = self._num_incomplete_steps = 0
        self._interrupts = Interrupts()
        self._reserve = _Reserve(output.with_name(f".{output.name}.reserve"))
        self._problems: list[str] = []

    def __len__(self) -> int:
        """Returns the number of complete episodes."""
        return len(self._writer)

    def __enter__(self) -> Self:
        self._interrupts.install()
        try:
            self.prepare_step(0)
        except BaseException:
            self._interrupts.restore()
            self._reserve.release()
            self._writer.discard()
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
            self._reserve.require(num_bytes + _MARGIN_BYTES)

    def add(self, trajectory: Mapping[str, Any]) -> None:
        """Adds a complete episode (`EpisodeWriter.add`)."""
        with self._interrupts.deferred():
            self._reserve.release()
            self._writer.add(trajectory)

    def add_incomplete(self, trajectory: Mapping[str, Any]) -> None:
        """Adds an episode that ended early, unless a simulator can play it again. Its last step becomes a truncation, and it
        is no success unless its steps say so. If it cannot be written beside the complete ones, it is written to the folder
        for temporary files.
        """
        if not self._keeps:
            return
        truncations, success = np.zeros((2, len(trajectory["actions"])), bool)
        truncations[-1] = not trajectory["terminations"][-1]
        success = success if trajectory["success"] is None else trajectory["success"]
        trajectory = {**trajectory, "truncations": truncations, "success": success}
        with self._interrupts.deferred():
            self._reserve.release()
            try:
                try:
                    self._add_incomplete(trajectory, self._output)
                except OSError as error:
                    self._problems.append(str(unwritten_page_error(error, self._output.parent)))
                    self._close_incomplete()
                    self._add_incomplete(trajectory, _temporary_folder() / self._output.name)
            except (OSError, ConfigError) as error:
                self._problems.append(f"{len(truncations)} steps are lost: {error}")
                return
        self.num_incomplete += 1
        self._num_incomplete_steps += len(truncations)

    def _add_incomplete(self, trajectory: Mapping[str, Any], output: Path) -> None:
        if self._incomplete_writer is None:
            self._incomplete_output = _next_incomplete(output)
            self._incomplete_writer = self._open_writer(self._incomplete_output)
        self._incomplete_writer.add(trajectory)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._interrupts.deferred():
                self._reserve.release()
                self._close_incomplete()
                if error is None:
                    self._writer.close()
                elif not self._keeps or not len(self):
                    self._writer.discard()
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
        except OSError as error:
            self._problems.append(str(unwritten_page_error(error, self._output)))

    def _close_incomplete(self) -> None:
        writer, self._incomplete_writer = self._incomplete_writer, None
        if writer is None:
            return
        try:
            if len(writer):
                writer.close()
            else:
                writer.discard()
        except OSError as error:
            self._problems.append(str(unwritten_page_error(error, self._incomplete_output)))

    def summary(self) -> str:
        """Returns a text about the episodes that are kept, and where; "" if none are."""
        if not self._keeps:
            return ""
        parts = [f"complete episodes: {len(self)} in {self._output}"] if len(self) else []
        if self.num_incomplete:
            parts.append(
                f"ended early: {self.num_incomplete} ({self._num_incomplete_steps} steps) in {self._incomplete_output}, which "
                "is read only if it is named"
            )
        return "; ".join([*parts, *self._problems])


def _next_incomplete(output: Path) -> Path:
    """Returns the path of the next dataset in `incomplete_folder`."""
    existing = incomplete_datasets(output)
    number = int(existing[-1].stem) + 1 if existing else 0
    return incomplete_folder(output) / f"{number}{output.suffix if output.suffix == '.h5' else ''}"


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
