"""`rlhpc watch` in a terminal: it draws runs, ends by a key or a signal, and leaves the terminal as it was."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.unit.live.test_run_index import write_run


def read_until(descriptor: int, text: str, timeout_s: float = 60.0) -> str:
    """What the terminal has shown when a text appears in it."""
    shown, deadline = b"", time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while text not in shown.decode(errors="replace"):
        assert time.monotonic() < deadline, shown[-2000:]
        if poll.poll(200):
            shown += os.read(descriptor, 1 << 16)
    return shown.decode(errors="replace")


@pytest.mark.parametrize("end", ["q", "SIGTERM", "SIGHUP"])
def test_in_a_terminal(tmp_path: Path, end: str) -> None:
    write_run(tmp_path / "runs/push-s1", state="finished", step=3, max_steps=3, stop_reason="\x1b]0;planted\x07")
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "rlhpc.cli", "watch", str(tmp_path / "runs")]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        shown = read_until(ours, "push-s1")
        assert "planted\x07" not in re.sub(r"\\x07", "", shown)
        if end == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(getattr(signal, end))
        deadline = time.monotonic() + 30
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        while process.poll() is None and time.monotonic() < deadline:
            if poll.poll(100):
                os.read(ours, 1 << 16)
        assert process.poll() == 0
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_without_a_terminal_it_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", state="finished", step=1)
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "watch", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert "watch needs a terminal; rlhpc status" in done.stderr
