"""Durable writer of a checkpoint's files, with checksums; a thread can write copies while training continues.

writes = Writes(folder, HostBuffers())
with writes.collect():
    save_tensors(folder / "model.safetensors", tensors)     # copies
checksums = writes.write()                                  # in a thread
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhpc.runtime.comm.background import AsyncWork, in_background
from rlhpc.runtime.disk_errors import GO_ON, advice
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.os_resources import free_memory
from rlhpc.runtime.trace_recorder import span, traced
from rlhpc.runtime.worker import Worker

#: Bytes that are written and hashed at a time; they fit into the processor's cache.
_WRITE_BYTES = 1 << 20
#: Files with fewer bytes are written at once, because a later request would take as long.
_MIN_ASYNC_BYTES = 16 << 20
#: Minimum ratio of free memory to the size of new copies, because training needs memory, too.
_MEMORY_FACTOR = 1.25

Value = TypeVar("Value")
#: File's name in the checkpoint → size in bytes and SHA-256; None for a file that was written without a checksum.
Checksums = dict[str, tuple[int, str] | None]


class ChecksummedFile:
    """New file with a running checksum of the written data.

    It has the methods that `torch.save` needs. It has no file descriptor, because some libraries would write to the descriptor
    and bypass the checksum.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self.size = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of the data.

        Raises:
            OSError: The filesystem refused the data. `failure` keeps the first error, because some callers replace errors.
        """
        unwritten_data = memoryview(data).cast("B")
        try:
            for start in range(0, len(unwritten_data), _WRITE_BYTES):
                chunk = unwritten_data[start : start + _WRITE_BYTES]
                self._hash.update(chunk)
                while chunk:
                    chunk = chunk[self._file.write(chunk) or 0 :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size += len(unwritten_data)
        return len(unwritten_data)

    def flush(self) -> None:
        """Does nothing: no data is buffered."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def end(self) -> tuple[int, str]:
        """Makes the content durable; returns the size and the checksum."""
        os.fsync(self._file.fileno())
        self._file.close()
        return self.size, self._hash.hexdigest()


def write_summed(path: Path, write: Callable[[ChecksummedFile], None]) -> tuple[int, str]:
    """Writes a new file durably.

    Args:
        path: The file.
        write: Function that writes the content.

    Returns:
        Size and SHA-256.

    Raises:
        CheckpointError: The file could not be written.
    """
    try:
        file = ChecksummedFile(path)
        try:
            write(file)
            return file.end()
        except BaseException:
            if file.failure is not None:
                raise file.failure from None
            raise
        finally:
            file.close()
    except OSError as error:
        raise make_write_error(path, error) from error


def make_write_error(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file that could not be written."""
    return CheckpointError(
        f"{path}: could not be written: {error.strerror or error}. {advice(error, path)}, then continue from the last "
        f"checkpoint with: {GO_ON}"
    )


class HostBuffers:
    """Host memory for copies of tensors, kept from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy_value(self, name: str, value: Value) -> Value | None:
        """Copies a value into the buffers. Returns None if memory is insufficient, or if the value is too small to copy.

        Args:
            name: Name of the target file. Copies for a name are valid until the next copies for this name.
            value: Dicts, lists and tuples with tensors. Values of other types in them are not copied.
        """
        tensors = list(_tensors(value, name))
        if sum(tensor.nbytes for _, tensor in tensors) < _MIN_ASYNC_BYTES:
            return None
        missing_bytes = sum(tensor.nbytes for key, tensor in tensors if not self._fits(key, tensor))
        if missing_bytes and missing_bytes * _MEMORY_FACTOR > free_memory():
            return None
        for key, tensor in tensors:
            if not self._fits(key, tensor):
                is_pinned = tensor.device.type != "cpu"  # pinned memory allows asynchronous copies
                self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
            self._buffers[key].copy_(tensor, non_blocking=True)
        copies = iter([self._buffers[key] for key, _ in tensors])
        copied_value: Value = map_tensors(value, lambda _: next(copies))
        return copied_value

    def wait_until_copied(self) -> None:
        """Waits until the copies are complete."""
        if any(tensor.is_pinned() for tensor in self._buffers.values()):
            torch.accelerator.synchronize()

    def _fits(self, key: str, tensor: torch.Tensor) -> bool:
        buffer = self._buffers.get(key)
        return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def map_tensors(state: Any, transform: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns nested dicts, lists and tuples with `transform` applied to each tensor, in order."""
    if isinstance(state, torch.Tensor):
        return transform(state)
    if isinstance(state, dict):
        mapped_state = copy.copy(state)  # state dicts have additional attributes
        mapped_state.update((name, map_tensors(child, transform)) for name, child in state.items())
        return mapped_state
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(child, transform) for child in state)
    return state


def _tensors(state: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield key, state.detach()
    elif isinstance(state, dict):
        for name, child in state.items():
            yield from _tensors(child, f"{key}/{name}")
    elif isinstance(state, (list, tuple)):
        for i, child in enumerate(state):
            yield from _tensors(child, f"{key}/{i}")


class Writes:
    """Files that one rank writes in one save.

    Args:
        folder: Folder of the checkpoint.
        copies: Buffers for copies of the data; None writes all files at once. Small files, and files whose copies do not
            fit into memory, are always written at once.
    """

    def __init__(self, folder: Path, copies: HostBuffers | None = None) -> None:
        self._folder, self._host_buffers = folder, copies
        self._queued_writes: list[tuple[str, Callable[[ChecksummedFile], None]]] = []
        self._checksums: Checksums = {}

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Assigns the files that `write_file` writes during the block to this save."""
        token = _active_writes.set(self)
        try:
            yield
        finally:
            _active_writes.reset(token)
        if self._host_buffers is not None:
            self._host_buffers.wait_until_copied()

    def add(self, path: Path, value: Value, write: Callable[[ChecksummedFile, Value], None]) -> None:
        """Adds a file; see `write_file`."""
        name = path.relative_to(self._folder).as_posix()
        copies = self._host_buffers.copy_value(name, value) if self._host_buffers is not None else None
        if copies is None:
            with span(name, "save") as save_span:
                self._checksums[name] = file_size, _ = write_summed(path, lambda file: write(file, value))
                save_span.add(bytes=file_size, is_large=file_size >= _MIN_ASYNC_BYTES)
        else:
            self._queued_writes.append((name, lambda file: write(file, copies)))

    @property
    def is_done(self) -> bool:
        """True if all files are written."""
        return not self._queued_writes

    @traced("write checkpoint", "save")
    def write(self) -> Checksums:
        """Writes the remaining files.

        Returns:
            The checksums of all files that this rank has written. Files that were written without `write_file` come from a
            listing of the folder, which also has files of other ranks and may lack files from other nodes.

        Raises:
            CheckpointError: A file could not be written.
        """
        for name, write_content in self._queued_writes:
            self._checksums[name] = write_summed(self._folder / name, write_content)
        self._queued_writes = []
        written_names = [
            path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()
        ]
        return {**dict.fromkeys(written_names), **self._checksums}


_active_writes: contextvars.ContextVar[Writes | None] = contextvars.ContextVar("collecting", default=None)


def write_file(path: Path, content: Value, write: Callable[[ChecksummedFile, Value], None]) -> None:
    """Writes a file durably, or queues it in the active save.

    Args:
        path: The file.
        content: Content of the file: tensors in dicts, lists and tuples.
        write: Function that writes the value or a copy of the value.

    Raises:
        CheckpointError: The file could not be written.
    """
    if (save := _active_writes.get()) is not None:
        save.add(path, content, write)
    else:
        write_summed(path, lambda file: write(file, content))


class SavingWorker(Worker):
    """Worker that takes part in checkpoints; it writes large files with `rlhpc.checkpoint.state`."""

    _host_buffers: HostBuffers | None = None
    _save: AsyncWork | None = None
    _checksums: Checksums | None = None

    def save(self, folder: str) -> None:
        """Writes this rank's state below `folder`."""
        raise NotImplementedError

    def load(self, folder: str) -> object:
        """Restores the state that `save` wrote."""
        raise NotImplementedError

    def begin_save(self, folder: str, writes_async: bool) -> Checksums | None:
        """Starts a save of this rank's state.

        Args:
            folder: Folder of the checkpoint.
            writes_async: Copy large data if memory suffices, and write the copies on a thread.

        Returns:
            The written files; None if a thread still writes, in which case `saved` returns the files later.

        Raises:
            CheckpointError: A file could not be written.
        """
        if writes_async and self._host_buffers is None:
            self._host_buffers = HostBuffers()
        writes = Writes(Path(folder), self._host_buffers if writes_async else None)
        with writes.collect(), span("save", "save"):
            self.save(folder)
        self._save, self._checksums = None, writes.write() if writes.is_done else None
        if self._checksums is None:
            self._save = in_background("save", writes.write)
        return self._checksums

    def saved(self, should_wait: bool) -> Checksums | None:
        """Returns the files that the current save has written; None if the save has not finished.

        Args:
            should_wait: Wait until the save has finished.

        Raises:
            CheckpointError: A file could not be written, or this rank was restarted after the save began.
        """
        if self._checksums is not None:
            return self._checksums
        if self._save is None:
            raise CheckpointError(
                f"{self.group_name}[{self.rank}] was restarted before it had written its part of a checkpoint"
            )
        checksums: Checksums | None = self._save.wait() if should_wait or self._save.done() else None
        return checksums
