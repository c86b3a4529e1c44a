"""Who was there when: the ranks that joined a run under way, from the lines that its driver writes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.files import is_count, is_number, read_file, read_json

#: What a line says: the driver gave it a place, it took part from then on, it has left.
JOINED, WORKS, LEFT = "joined", "works", "left"


@dataclass
class Stay:
    """One rank that joined, from its coming to its going. Times are Unix times; None if it has not happened (yet).

    Attributes:
        job: Slurm's id; "" outside of a job.
        accelerators: How many it has.
        why: Why it left.
    """

    group: str
    rank: int
    node: str
    job: str
    accelerators: int
    joined: float
    works: float | None = None
    left: float | None = None
    why: str = ""

    def hours(self, now: float | None = None) -> float:
        """For how long it was there."""
        return max(0.0, (self.left or now or time.time()) - self.joined) / 3600


class Attendance:
    """The driver's side: appends a line for each that joins, takes part or leaves.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._there = dict.fromkeys(key for key, stay in _stays(path).items() if stay.left is None)
        self.close("its driver was gone")  # of those whose driver was killed

    def note(self, event: Mapping[str, Any]) -> None:
        """Appends a line. A disk that is full is no reason not to train."""
        with self._lock:
            key = str(event.get("incarnation"))
            if event["event"] == JOINED:
                self._there[key] = None
            elif key not in self._there:
                return
            elif event["event"] == LEFT:
                del self._there[key]
            line = json.dumps({"time": time.time(), **event}).encode() + b"\n"
            try:
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            except OSError:
                return
            try:
                os.write(fd, line)
            except OSError:
                return
            finally:
                os.close(fd)

    def close(self, why: str) -> None:
        """All that are there have left, for this reason."""
        for key in list(self._there):
            self.note({"event": LEFT, "incarnation": key, "why": why})


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = read_file(path).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = read_json(line)
        except ValueError:
            continue  # the disk was full, or it is being written
        if isinstance(event, dict) and "event" in event and "incarnation" in event and _has_sound_numbers(event):
            yield event


def _has_sound_numbers(event: Mapping[str, Any]) -> bool:
    return is_number(event.get("time") or 0.0) and all(is_count(event.get(k) or 0) for k in ("rank", "accelerators"))


def stays(paths: RunPaths) -> list[Stay]:
    """All ranks that have joined a run, in the order in which they came."""
    return list(_stays(paths.attendance).values())


def _stays(path: Path) -> dict[str, Stay]:
    """They by their incarnations."""
    found: dict[str, Stay] = {}
    for event in _events(path):
        key, at = str(event["incarnation"]), float(event.get("time") or 0.0)
        if event["event"] == JOINED:
            found[key] = Stay(
                str(event.get("group")), int(event.get("rank") or 0), str(event.get("node") or "?"),
                str(event.get("job") or ""), int(event.get("accelerators") or 0), at,
            )  # fmt: skip
        elif key in found and event["event"] == WORKS:
            found[key].works = at
        elif key in found:
            found[key].left, found[key].why = at, str(event.get("why") or "")
    return found
