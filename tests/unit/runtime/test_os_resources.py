"""Processes that end with their parent, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.runtime.os_resources import start_bound_to_parent

PARENT = """
import signal, sys, time
from rlhpc.runtime.os_resources import start_bound_to_parent
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
process = start_bound_to_parent(["bash", "-c", 'grep SigBlk /proc/self/status; exec sleep 60'], stdout=sys.stdout)
print(process.pid, flush=True)
time.sleep(60)
"""


def test_the_command_ends_with_its_parent_and_has_no_signal_blocked() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline(), parent.stdout.readline()]
    [blocked] = [line for line in lines if "SigBlk" in line]
    pid = int(next(line for line in lines if line.strip().isdigit()))
    parent.kill()
    parent.communicate()
    assert int(blocked.split()[1], 16) == 0
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the command outlived its parent"
        time.sleep(0.02)


def test_it_is_the_command_itself_that_is_started() -> None:
    process = start_bound_to_parent(["bash", "-c", "echo $0 $$ $PPID $MINE; exit 7", "a b"], signal.SIGTERM,
                                    stdout=subprocess.PIPE, env={**os.environ, "MINE": "x y"})  # fmt: skip
    output, _ = process.communicate(timeout=30)
    assert output.decode() == f"a b {process.pid} {os.getpid()} x y\n" and process.returncode == 7


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        start_bound_to_parent(["no-such-command-anywhere"])
    with pytest.raises(FileNotFoundError):
        start_bound_to_parent(["bash"], env={"PATH": "/nowhere"})
