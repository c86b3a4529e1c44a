"""Keeper of a service's program: ends the program and all its descendants when the rank ends or is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

from rlhpc.runtime.os_resources import adopt_orphans, readable_descriptors

#: Seconds between two checks of the program, and time limit of its termination, in seconds.
_POLL_S, _STOP_S = 0.2, 3.0


def main() -> None:
    """Runs the program of the command-line arguments until the standard input closes, which happens when the rank ends."""
    adopt_orphans()
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not readable_descriptors([0], _POLL_S):
        pass
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(_STOP_S)
    deadline = time.monotonic() + _STOP_S
    while (descendants := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in descendants:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(descendants, 0.2)
    os._exit(process.returncode if (process.returncode or -1) >= 0 else 1)


if __name__ == "__main__":
    main()
