"""What the driver knows about a rank, and how it reports a rank's end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhpc.runtime.comm.serialization import pickled
from rlhpc.runtime.errors import UserError, WorkerFailed
from rlhpc.runtime.log_tails import last_lines, tail
from rlhpc.runtime.spec import WorkerSpec
from rlhpc.runtime.starters import Member, Starter


def all_in(state: str, members: Sequence[Member]) -> Callable[[], bool]:
    """A function that tells whether all have reached `state`; it checks each only until it has, however often it is called."""
    left = list(members)

    def answer() -> bool:
        while left and left[-1].state == state:
            left.pop()
        return not left

    return answer


def class_body(payload: tuple[type, tuple[Any, ...], dict[str, Any]]) -> bytes:
    """Pickles (class, args, kwargs): by reference if the worker can import the class, otherwise by value."""
    return pickled(payload)


def said_before_its_log(member: Member) -> str:
    """What a rank printed that died before it opened its log, as the end of a message; saved in that log if possible."""
    said, log_err = "", Path(member.spec.log_err)
    with contextlib.suppress(OSError):
        if not log_err.exists():
            said = member.starter.said(member)
            log_err.write_text(said + "\n")
    return last_lines(said)


def death(spec: WorkerSpec, status: int, said: str = "") -> WorkerFailed:
    """The failure that a rank's wait status stands for; `said` ends the message if the rank's log is silent."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    how = f"was killed by signal {number} ({signal.Signals(number).name})" if number else (
        f"exited with status {os.WEXITSTATUS(status)}")  # fmt: skip
    if number == signal.SIGKILL:
        how += "; if nobody killed it, look for the out-of-memory killer (dmesg, sacct)"
    failure = WorkerFailed(
        f"{spec.group}[{spec.rank}] on node {spec.node} {how} (log {spec.log_err}){said or tail(spec.log_err)}",
        group=spec.group, rank=spec.rank, node=spec.node, log_path=spec.log_err, exit_signal=number,
    )  # fmt: skip
    if not number and os.WEXITSTATUS(status) == UserError.exit_code:  # its log says what the user can do about it
        failure.exit_code, failure.__cause__ = UserError.exit_code, UserError(how)
    return failure


def by_starter(members: Sequence[Member]) -> dict[Starter, list[Member]]:
    """The members of each starter."""
    found: dict[Starter, list[Member]] = {}
    for member in members:
        found.setdefault(member.starter, []).append(member)
    return found


def records_by_group(members: Sequence[Member]) -> list[list[dict[str, Any]]]:
    """The members' records, those of a group together: a call goes to ranks of one group."""
    found: dict[str, list[dict[str, Any]]] = {}
    for member in members:
        found.setdefault(member.spec.group, []).append(member.record)
    return list(found.values())
