"""Logs of a run: marker lines between the starts that one log file holds, and the follower of `rlhpc logs --follow`, which
prints new lines with few file operations, however many ranks a run has.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import revalidate_folder
from rlhpc.jobs.state import FINAL, OVER, queue_probe, states
from rlhpc.runtime.files import open_file, read_json
from rlhpc.runtime.log_sizes import read_log_sizes

#: Seconds between two looks at the run's status and its folders, and between two full checks of a run that looks unchanged.
_LOOK_S, _FULL_CHECK_S = 5.0, 60.0
#: Number of logs without a known size that one poll reads: beside known sizes, and without any.
_NUM_UNKNOWN_BESIDE, _NUM_UNKNOWN = 1, 2
#: Seconds for which a log that has grown is read before others.
_HOT_S = 10.0
#: Seconds for which a log is read again that has grown by its size, but shows no new line: on a network filesystem, what a
#: rank has written may be visible later than its size is known.
_DELAYED_S = 60.0
#: Maximum bytes of a log that one poll reads.
_MAX_READ_BYTES = 1 << 22


class LogFollower:
    """Follower of a run's logs.

    The driver of a run writes the sizes of its ranks' logs into one file (`log_sizes`), so that a poll reads this file and the
    logs that have grown. Logs that are not in this file, such as those of an earlier version's run, are read in turn, first
    those that have grown lately. At the end of the run, all logs are read once.

    Args:
        paths: The run.
        list_files: Returns a dict from log file to label of its lines.
        offsets: Log file → number of bytes that have been printed; updated.
        write: Prints lines with their label.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        paths: RunPaths,
        list_files: Callable[[], dict[Path, str]],
        offsets: dict[Path, int],
        write: Callable[[str, list[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._list_files, self._offsets, self._write = paths, list_files, offsets, write
        self._clock = clock
        self._probe = queue_probe(patience_s=0.0)
        self._labels = dict[Path, str]()
        self._folders: tuple[Path, ...] = ()
        self._folder_times: tuple[int, ...] = ()
        self._submit_time = self._num_polls = 0
        self._next_update, self._next_check = 0.0, 0.0
        self._sizes = dict[Path, tuple[str, ...]]()
        self._growth_times = dict[Path, float]()
        self._delay_ends = dict[Path, float]()  # grown logs without a new line → time until which they are read again
        self._next_unsized = 0

    def poll(self) -> bool:
        """Prints new lines; returns whether the run is over, so that no line will follow."""
        now, is_over = self._clock(), False
        if now >= self._next_update:
            self._next_update = now + _LOOK_S
            is_over = self._update_list(now)
        for path in list(self._labels) if is_over else self._candidates(now):
            if lines := self._read_new_lines(path):
                self._growth_times[path] = now
                self._delay_ends.pop(path, None)
                self._write(self._labels[path], lines)
        self._num_polls += 1
        return is_over

    def _update_list(self, now: float) -> bool:
        """Updates the list of logs, and returns whether the run is over. Makes a full check if the status or the
        submissions changed.
        """
        submit_time = revalidate_folder(self._paths.submit)
        if submit_time != self._submit_time or now >= self._next_check or self._has_final_status():
            self._submit_time, self._next_check = submit_time, now + _FULL_CHECK_S
            [(_, run)] = states([self._paths], self._probe)
            is_over = run.state in (*OVER, "unknown")
            self._list()
            return is_over
        if tuple(map(revalidate_folder, self._folders)) != self._folder_times:
            self._list()
        return False

    def _has_final_status(self) -> bool:
        try:
            with open_file(self._paths.driver_state) as file:
                status = read_json(os.read(file.fileno(), _MAX_READ_BYTES))
        except (OSError, ValueError):
            return False
        return isinstance(status, dict) and status.get("state") in FINAL

    def _list(self) -> None:
        self._labels = self._list_files()
        self._folders = tuple(dict.fromkeys(path.parent for path in self._labels))
        self._folder_times = tuple(map(revalidate_folder, self._folders))

    def _candidates(self, now: float) -> Iterable[Path]:
        """Returns the logs to read now: those with a new size, and some of those without a known size."""
        sizes = dict[Path, tuple[str, ...]]()
        for folder in self._folders:
            for name, (out, err, state) in read_log_sizes(folder).items():
                sizes |= {folder / f"{name}.out": (out, state), folder / f"{name}.err": (err, state)}
        grown_files = [path for path in self._labels if path in sizes and sizes[path] != self._sizes.get(path)]
        if not self._sizes:  # most have been read to their end before
            grown_files = [path for path in grown_files if sizes[path][0] != str(self._offsets.get(path, 0))]
        self._sizes = sizes
        retried_files = self._next_delayed(now)
        self._delay_ends |= dict.fromkeys(grown_files, now + _DELAYED_S)
        unknown_files = [path for path in self._labels if path not in sizes]
        count = _NUM_UNKNOWN if not sizes else _NUM_UNKNOWN_BESIDE * (self._num_polls % 2)
        hot = sorted(
            (path for path in unknown_files if now - self._growth_times.get(path, -_HOT_S) < _HOT_S),
            key=self._growth_times.__getitem__,
        )
        picked_files = hot[: count // 2]
        remaining_files = [path for path in unknown_files if path not in picked_files]
        for _ in range(min(count - len(picked_files), len(remaining_files))):
            self._next_unsized += 1
            picked_files.append(remaining_files[self._next_unsized % len(remaining_files)])
        return list(dict.fromkeys([*grown_files, *retried_files, *picked_files]))

    def _next_delayed(self, now: float) -> list[Path]:
        """Returns the next log whose new lines were not visible yet; later calls return the other such logs."""
        self._delay_ends = {path: end for path, end in self._delay_ends.items() if now < end and path in self._labels}
        for path in self._delay_ends:
            self._delay_ends[path] = self._delay_ends.pop(path)  # moves to the end
            return [path]
        return []

    def _read_new_lines(self, path: Path) -> list[str]:
        """Returns the complete lines after the file's offset, and moves the offset past them."""
        offset = self._offsets.get(path, 0)
        try:
            with open_file(path) as file:
                if os.fstat(file.fileno()).st_size < offset:
                    offset = 0  # replaced by a shorter file
                content = os.pread(file.fileno(), _MAX_READ_BYTES, offset)
        except (OSError, ValueError):  # an invalid file name
            return []
        complete_lines = content[: content.rfind(b"\n") + 1]
        if len(content) == _MAX_READ_BYTES and not complete_lines:
            complete_lines = content
        self._offsets[path] = offset + len(complete_lines)
        return complete_lines.decode("utf-8", "replace").removesuffix("\n").split("\n") if complete_lines else []


_START_LINE = re.compile(r"---- start (\d+), \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ----")
_RANK_LOG_NAME = re.compile(r".+-\d+")
#: Values of `rlhpc logs --start` besides numbers.
LAST, ALL = "last", "all"


def mark_start(folder: Path) -> None:
    """Appends a marker line for a new start to each log of a folder; does nothing if no rank has written there yet."""
    files = [file for pattern in ("*.out", "*.err") for file in folder.glob(pattern) if file.stat().st_size]
    if not any(_RANK_LOG_NAME.fullmatch(file.stem) for file in files):  # the driver's own log may already exist
        return
    start_number = 1 + max((_last_start_number(file) for file in files), default=0)
    start_line = f"---- start {start_number}, {time.strftime('%Y-%m-%d %H:%M:%S')} ----\n"
    for file in files:
        with file.open("rb+") as log:
            log.seek(-1, 2)
            ends_line = log.read(1) == b"\n"
        with file.open("a", encoding="utf-8") as log:
            log.write(start_line if ends_line else f"\n{start_line}")


def _last_start_number(file: Path) -> int:
    """Returns the number of the last start in a log."""
    with file.open(encoding="utf-8", errors="replace") as log:
        start_numbers = [int(match[1]) for line in log if (match := _START_LINE.fullmatch(line.rstrip("\n")))]
    return max(start_numbers, default=1)


def lines_of_start(lines: Iterable[str], start: str) -> list[str]:
    """Returns the lines that a start of the run wrote.

    Args:
        lines: Lines of a log or of its end.
        start: The start's number, `last` or `all`.
    """
    if start == ALL:
        return list(lines)
    start_lines: list[str] = []
    start_number, is_selected = 1, start in (LAST, "1")
    for line in lines:
        if match := _START_LINE.fullmatch(line):
            start_number = int(match[1])
            is_selected = start in (LAST, str(start_number))
            if start == LAST:
                start_lines.clear()
        elif is_selected:
            start_lines.append(line)
    return start_lines
