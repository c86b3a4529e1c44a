"""Notices of robots that must not move: a safety stop, and a process that ended without closing its robot.

A notice is a file of the user on the robot's machine. A robot with a notice holds still until a person withdraws the notice
(`rlhpc robot resume`), even in a later process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json, remove_if, replace_durably
from rlhpc.runtime.host import node_name, state_folder
from rlhpc.runtime.ownership import make_private


def notices_folder() -> Path:
    """Returns the folder of notices."""
    return state_folder("robots")


def robot_name(path: str, kwargs: Mapping[str, Any]) -> str:
    """Returns the name of a robot. It is the same in all processes that build the robot with the same class and arguments."""
    digest = hashlib.sha256(json.dumps([path, kwargs], sort_keys=True, default=str).encode()).hexdigest()
    return f"{re.sub('[^A-Za-z0-9]+', '-', path).strip('-')}-{digest[:6]}"


def _process_start_time(pid: int) -> str | None:
    """Returns the start time of a process of this machine, in kernel ticks; None if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


class Notice:
    """Notice of one robot.

    Args:
        robot: Name of the robot (`robot_name`).
    """

    def __init__(self, robot: str) -> None:
        self.robot = robot
        self._path, self._resume_path = (notices_folder() / f"{robot}.{suffix}" for suffix in ("json", "resume"))
        make_private(self._path.parent, parents=True)
        self._id, self._reason = 0, ""
        self._lock = threading.Lock()

    def earlier_reason(self) -> str:
        """Returns the reason from an earlier process's notice why the robot must hold still; empty if it may move."""
        try:
            record = read_json(self._path.read_bytes())
            reason, node, pid, notice_id = str(record["reason"]), record["node"], int(record["pid"]), record["id"]
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError):
            return "the notice of the process before cannot be read"
        if reason:
            return "" if self._is_withdrawn(notice_id) else reason
        if node == node_name() and _process_start_time(pid) == record.get("began"):
            return ""
        return f"process {pid} on {node} ended without closing it"

    def post(self, reason: Callable[[], str]) -> None:
        """Writes the notice if it does not exist or has another reason. A notice without a reason takes effect when this
        process ends.
        """
        with self._lock:  # the last caller writes the current reason
            current_reason = reason()
            if not self._id or self._reason != current_reason:
                self._reason, self._id = current_reason, time.time_ns()
                self._write()

    def _write(self) -> None:
        record = {"robot": self.robot, "reason": self._reason, "since": time.time(), "id": self._id, "node": node_name(),
                  "pid": os.getpid(), "began": _process_start_time(os.getpid())}  # fmt: skip
        replace_durably(self._path, json.dumps(record).encode(), mode=0o600, sync=False)

    def resumed(self) -> bool:
        """Returns whether a person has withdrawn this notice."""
        return self._is_withdrawn(self._id)

    def _is_withdrawn(self, number: int) -> bool:
        with suppress(OSError, ValueError):
            return self._resume_path.read_text() == str(number)
        return False

    def remove(self) -> None:
        """Removes the notice that this process has posted; keeps one that another process has posted since."""
        with self._lock:
            if self._id:
                remove_if(self._path, self._is_own)
                remove_if(self._resume_path, self._withdraws_no_later_notice)
            self._id = 0

    def _is_own(self, path: Path) -> bool:
        """Returns whether a file is this process's notice."""
        with suppress(OSError, ValueError, AttributeError):
            return bool(read_json(path.read_bytes()).get("id") == self._id)
        return False

    def _withdraws_no_later_notice(self, path: Path) -> bool:
        """Returns whether a file withdraws this process's notice or an earlier one; ids are times."""
        with suppress(OSError, ValueError):
            return int(path.read_text()) <= self._id
        return False


def stopped_robots() -> list[dict[str, Any]]:
    """Returns the notices that have a reason."""
    records = []
    for path in sorted(notices_folder().glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = dict(read_json(path.read_bytes()))
            if record["reason"]:
                records.append(record)
    return records


def resume(robot: str) -> str:
    """Withdraws the notice of a stopped robot, and returns the reason of the stop.

    Raises:
        ConfigError: No robot of that name is stopped.
    """
    records = {record["robot"]: record for record in stopped_robots()}
    if robot not in records:
        names = ", ".join(records) or "none"
        raise ConfigError(
            f"no robot {robot!r} is stopped on this machine; stopped are: {names} (rlhpc robot resume lists them)"
        )
    path = notices_folder() / f"{robot}.resume"
    replace_durably(path, str(records[robot]["id"]).encode(), mode=0o600, sync=False)
    return str(records[robot]["reason"])
