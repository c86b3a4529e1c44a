"""What the kernel does for a process when its parent, or its child, ends."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process a signal when its parent dies; exits at once if that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


#: Runs in the child instead of a function between fork and exec: that would be Python in a copy of this process, in which
#: other threads may have held any lock. Takes the parent's process id, the signal, and the command.
_ASKS_AND_EXECUTES = """
import ctypes, os, signal, sys
parent, number, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(number))
if os.getppid() != int(parent):
    os._exit(1)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
try:
    os.execvp(command[0], command)
except OSError as error:
    os.write(2, f"{command[0]}: {error.strerror}\\n".encode())
    os._exit(127)
"""


def start_bound_to_parent(
    command: Sequence[str], number: int = signal.SIGKILL, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a command that gets a signal when this process, or the thread that calls this, ends. It starts with no signal
    blocked.

    Args:
        command: The command.
        number: The signal.
        options: Of `subprocess.Popen`.

    Raises:
        OSError: There is no such command.
    """
    if shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH", os.defpath)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    python = [sys.executable, "-I", "-S", "-c", _ASKS_AND_EXECUTES, str(os.getpid()), str(int(number))]
    return subprocess.Popen([*python, *command], **options)


def outlive_parent() -> None:
    """Undoes `die_with_parent`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Makes orphans among this process's descendants its own children, so that it can end and reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
