"""Where ranks are when a wait has reached its deadline: the rank waited for may itself be waiting for the one that hangs."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.errors import RlhpcError

if TYPE_CHECKING:
    from rlhpc.runtime.comm.service import Service

#: Seconds for all ranks together to say where they are.
PATIENCE_S = 1.0
_COMM = str(Path(__file__).resolve().parent / "comm")
#: A rank with one of these among its innermost frames is waiting for others.
_WAITS = (f"{_COMM}/", "/torch/distributed/")
_INNERMOST = 12

Frame = tuple[str, int, str]


def main_stack() -> list[Frame]:
    """File, line and function of the main thread's innermost calls, the innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[Frame] = []
    while frame is not None and len(found) < _INNERMOST:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def busy(service: Service, calls: Sequence[tuple[dict[str, Any], str]], seconds: float) -> list[str]:
    """A sentence for each rank that is in a call and not waiting for others: where it is.

    Args:
        service: The service of this process.
        calls: Records of ranks, with the method that each is in.
        seconds: How long the wait has lasted.
    """
    asked, until = [], time.monotonic() + PATIENCE_S
    for record, method in {record["rpc"]["ipc"]: (record, method) for record, method in calls}.values():
        try:
            whom = f"{record['group']}-{record['rank']} to say where it is"
            limit = max(0.01, until - time.monotonic())
            asked.append((record, method, service.peers.begin(choose(record["data"]), b"DOING", [], whom, limit)))
        except (RlhpcError, OSError):
            continue  # it is gone, which others report
    told = []
    for record, method, pending in asked:
        who = f"{record['group']}[{record['rank']}] on node {record['node']}"
        try:
            stack = pickle.loads(service.peers.reply_to(pending, max(0.01, until - time.monotonic()))[0])
        except (RlhpcError, OSError):
            where = "it does not even say where it is"
        else:
            if not stack or any(wait in file for file, _, _ in stack for wait in _WAITS):
                continue
            file, line, function = stack[-1]
            where = f"it is in {function} ({file}:{line})"
        told.append(f"{who} has not come back from {method}() in {seconds:.1f} s: {where}; log {record['log_err']}")
    return told
