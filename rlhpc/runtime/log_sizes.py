"""Log sizes of a run's ranks: one small file in the log folder, by which a reader knows which logs have grown.

A rank reads the positions of its own standard streams, which takes no file operation, and tells the driver when they have
changed. The driver writes the sizes of all logs into one file, at most every `WRITE_S` seconds. A command that follows the
logs reads this file instead of all logs. The sizes are hints: only a difference from an earlier size has a meaning.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from rlhpc.runtime.files import open_file

#: Name of the file in the log folder.
LOG_SIZES = "sizes.txt"
#: Minimum seconds between two writes of the file, and seconds between two checks whether sizes have changed.
WRITE_S, _CHECK_S = 0.4, 0.2
_MAX_BYTES = 1 << 24

#: Positions of a process's standard output and standard error in their files, in bytes.
Positions = tuple[int, int]


def stream_positions() -> Positions:
    """Returns the positions of this process's standard output and standard error; 0 for a stream that is not a file.

    For a file that is opened for appending, the position is the file's size after the last write of this process and of its
    children.
    """
    stdout_position, err = (_read_position(fd) for fd in (1, 2))
    return stdout_position, err


def _read_position(fd: int) -> int:
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return 0


class LogSizesFile:
    """Thread that writes the sizes of all logs of a session into one file in its log folder.

    The file is overwritten in place, because a network filesystem may show a reader an earlier file under a name that was
    replaced. A reader may see a mixture of old and new lines.

    Args:
        log_dir: Folder of the logs.
        rows: Returns name, state and stream positions of each rank. Called often.
    """

    def __init__(self, log_dir: Path, rows: Callable[[], Iterable[tuple[str, str, Positions]]]) -> None:
        self._path, self._rows = log_dir / LOG_SIZES, rows
        self._content = b""
        self._own_name = _log_name(log_dir, 1) or _log_name(log_dir, 2)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlhpc-log-sizes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop_event.wait(_CHECK_S):
            if self._write():
                self._stop_event.wait(WRITE_S - _CHECK_S)

    def _write(self) -> bool:
        """Writes the file if a size or a state has changed; returns whether it has."""
        rows = list(self._rows())
        if self._own_name:
            rows.append((self._own_name, "running", stream_positions()))
        sizes_text = "".join(
            f"{stdout_position:>15} {err:>15} {rank_state:<8} {name}\n"
            for name, rank_state, (stdout_position, err) in rows
        ).encode()
        if sizes_text == self._content:
            return False
        with contextlib.suppress(OSError):  # a full disk, or a removed folder
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                os.pwrite(fd, sizes_text, 0)
                if len(sizes_text) < len(self._content):
                    os.ftruncate(fd, len(sizes_text))
            finally:
                os.close(fd)
            self._content = sizes_text
        return True

    def stop(self) -> None:
        """Writes the file a last time, and ends the thread."""
        self._stop_event.set()
        self._thread.join(WRITE_S)
        self._write()


def _log_name(log_dir: Path, fd: int) -> str:
    """Returns the name, without suffix, of the log to which a standard stream of this process writes; "" if there is no such
    log.
    """
    with contextlib.suppress(OSError):
        log = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if log.parent == log_dir.resolve():
            return log.stem
    return ""


def read_log_sizes(log_dir: Path) -> dict[str, tuple[str, ...]]:
    """Returns the sizes and the state of each rank, as text, by name; {} if there is no file. Ignores malformed lines."""
    try:
        with open_file(log_dir / LOG_SIZES) as file:
            sizes_text = os.read(file.fileno(), _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    rows = (line.split() for line in sizes_text.splitlines())
    return {row[3]: (row[0], row[1], row[2]) for row in rows if len(row) == 4}
